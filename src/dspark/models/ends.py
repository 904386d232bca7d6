"""The two ends of a target: what a drafter borrows of it, and all that training on stored states needs.

Shapes: V vocabulary, H hidden size.
"""

from typing import Protocol, Self

from torch import Tensor, nn

from dspark.models.config import DecoderConfig


class TargetEnds(Protocol):
    """Any target as a drafter and its trainer see it: whole, or its ends alone."""

    @property
    def config(self) -> DecoderConfig: ...  # of a model that we do not decode: what a drafter takes over of its sizes
    @property
    def embed_tokens(self) -> nn.Embedding: ...
    @property
    def norm(self) -> nn.Module: ...  # the final norm
    @property
    def lm_head_weight(self) -> Tensor: ...  # [V, H], the rows that turn normed states into logits


class Ends(nn.Module):
    """Embedding table, final norm and LM head of a target, without the layers between them."""

    def __init__(
        self, config: DecoderConfig, embed_tokens: nn.Embedding, norm: nn.Module, lm_head_weight: Tensor
    ) -> None:
        """`lm_head_weight` [V, H] is the embedding table itself where the two are tied."""
        super().__init__()
        self.config = config
        self.embed_tokens = embed_tokens
        self.norm = norm
        size, width = lm_head_weight.shape
        self.lm_head = nn.Linear(width, size, bias=False, device="meta")
        tied = lm_head_weight is embed_tokens.weight
        self.lm_head.weight = embed_tokens.weight if tied else nn.Parameter(lm_head_weight.detach())
        self.requires_grad_(False).eval()

    @classmethod
    def of(cls, target: TargetEnds) -> Self:
        """The ends of a whole target, sharing its tensors: the layers are freed with the target."""
        return cls(target.config, target.embed_tokens, target.norm, target.lm_head_weight)

    @property
    def lm_head_weight(self) -> Tensor:
        """The rows [V, H] that turn normed states into logits."""
        return self.lm_head.weight
