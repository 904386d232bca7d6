"""The small parts of a decoder: norms, embeddings, soft-capping."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.shape = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class PlusOneRMSNorm(RMSNorm):
    """The norm of files that store weight - 1 (Gemma 3). `weight` has the 1 added and stays float32.

    In bfloat16 the sum would lose most of what was stored; so the product is float32 too, rounded once.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)


class ScaledEmbedding(nn.Embedding):
    """Rows of the table times the square root of their length, that factor rounded to the table's dtype (Gemma)."""

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = super().forward(token_ids)
        return rows * rows.new_full((), rows.shape[-1] ** 0.5)


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), which keeps order and stays within +-cap; x itself where `cap` is None."""
    return x if cap is None else torch.tanh(x / cap) * cap
