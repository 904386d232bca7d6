"""Rotary position embeddings, with the scalings of transformers' `modeling_rope_utils`.

Shapes: B rows of a batch, T tokens a row, h heads, D head dimension.
"""

import math

import torch
from torch import Tensor

from dspark.models.config import RopeConfig

Rotation = tuple[Tensor, Tensor]  # cos and sin, from `RotaryEmbedding`


class RotaryEmbedding:
    """Cosines and sines by position, computed in float32 whatever the dtype of the model.

    Every position has one angle, however the rows are cut into forwards: `dynamic` scaling stretches position p as a
    context of p + 1 tokens asks, which is what transformers does when it decodes one token at a time. So a verify
    block and plain decoding see the same keys.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.inv_freq, self.attention_scaling = _frequencies(rope, head_dim)  # [D/2]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [B, T, 1, D] for positions i64 [B, T]; the first half of sin is negated for `apply`."""
        angles = positions[..., None].float() * self._inverse_frequencies(positions)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)

    def _inverse_frequencies(self, positions: Tensor) -> Tensor:  # [D/2] or, where they depend on position, [B, T, D/2]
        rope = self.rope
        if rope.rope_type != "dynamic":
            self.inv_freq = self.inv_freq.to(positions.device)
            return self.inv_freq
        assert rope.factor is not None
        assert rope.max_position_embeddings is not None
        length = (positions + 1).clamp(min=rope.max_position_embeddings).double()
        stretch = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1)
        base = rope.rope_theta * stretch ** (self.head_dim / (self.head_dim - 2))
        return (1.0 / base[..., None] ** _exponents(self.head_dim, positions.device).double()).float()


def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [B, T, h, D]: component i of the first half forms a plane with component i of the second half.

    `cos` and `sin` come from `RotaryEmbedding`; swapping the halves of x and the sign inside `sin` is the rotation.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _exponents(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies [D/2] and the factor on cosines and sines."""
    inv_freq = 1.0 / rope.rope_theta ** _exponents(head_dim)
    match rope.rope_type:
        case "linear":
            assert rope.factor is not None
            return inv_freq / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inv_freq), 1.0
        case "yarn":
            return _yarn(rope, inv_freq, head_dim), _yarn_attention_factor(rope)
        case "proportional":  # the fastest planes of the head turn, the others stand still
            assert rope.partial_rotary_factor is not None
            inv_freq[int(rope.partial_rotary_factor * head_dim // 2) :] = 0
            return inv_freq / (rope.factor or 1.0), 1.0
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: keep short wavelengths, divide long ones by `factor`, blend between."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    assert low is not None
    assert high is not None
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # rotations within the trained context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): interpolate slow components, keep fast ones, ramp between beta_slow and beta_fast."""
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    trained = rope.original_max_position_embeddings

    def dimension(rotations: float) -> float:  # the component that turns so often within the trained context
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * (1 - keep) + inv_freq * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    assert rope.factor is not None
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
