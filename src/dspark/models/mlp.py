"""The feed-forward part of a decoder layer: one MLP, or a router and many.

Shapes: B requests, T rows a request, N = B * T, H hidden size, I intermediate size, E experts, K experts of a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.config import DecoderConfig


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [B, T, I] each
        out: Tensor = self.down_proj(activation(self.act, gate) * up)
        return out


class Experts(nn.Module):
    """The weights of E MLPs, stacked."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, act: str) -> None:
        super().__init__()
        gate_up = torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        down = torch.empty(num_experts, hidden_size, intermediate_size)
        self.gate_up_proj = nn.Parameter(gate_up.uniform_(-0.05, 0.05))
        self.down_proj = nn.Parameter(down.uniform_(-0.05, 0.05))
        self.act = act

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Run rows x [n, H] through one expert."""
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(activation(self.act, gate) * up, self.down_proj[expert])


class SparseMLP(nn.Module):
    """Each row goes to the K experts that the router scores highest; their outputs are summed, weighted by the score.

    A row's own experts are summed in the order of their number, so what it gets does not depend on its batch.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.moe is not None
        moe = config.moe
        self.gate = nn.Linear(config.hidden_size, moe.num_experts, bias=False)
        self.experts = Experts(moe.num_experts, config.hidden_size, moe.moe_intermediate_size, config.hidden_act)
        self.num_experts, self.top_k, self.normalise = moe.num_experts, moe.num_experts_per_tok, moe.norm_topk_prob

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # [N, H]
        weights, chosen = self.gate(flat).softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)  # [N, K]
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)  # [N * K]: the pairs (row, choice), grouped by expert
        counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()
        out = torch.zeros_like(flat)
        for expert, pairs in enumerate(by_expert.split(counts)):
            if len(pairs):
                rows = pairs // self.top_k
                scale = weights.flatten()[pairs, None].to(x.dtype)
                out.index_add_(0, rows, self.experts(flat[rows], expert) * scale)
        return out.view_as(x)


def activation(name: str, x: Tensor) -> Tensor:
    """Apply the activation that `DecoderConfig.hidden_act` names."""
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_pytorch_tanh":
            return F.gelu(x, approximate="tanh")
    raise AssertionError(name)
