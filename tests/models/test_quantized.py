"""8-bit weights: every kernel multiplies by the same ones, and they are close to the stored."""

from pathlib import Path

import pytest
import torch
from tiny_target import save_tiny_target
from torch import nn

from dspark.models.quantized import QuantizedLinear, make_quantized_kernel, quantize_rows
from dspark.models.target import load_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_nearest(dtype: torch.dtype) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    values, scales = quantize_rows(weight)
    assert (scales.dtype, values.dtype) == (dtype, torch.int8)
    error = values.float() * scales.float()[:, None] - weight.float()
    # In bfloat16 the largest value may lie beyond 127 scales, by the scale's own rounding.
    slack = 0.5 if dtype == torch.float32 else 0.5 + 127 * 2**-8
    assert (error.abs() <= slack * scales.float()[:, None] * 1.001).all()
    assert not values[3].any()


@pytest.mark.parametrize("name", ["plain", "packed", "packed_float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_kernels_multiply_by_the_same_weights(name: str, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values, scales = quantize_rows(torch.randn(96, 64, generator=generator).to(dtype))
    x = torch.randn(1, rows, 128, generator=generator).to(dtype)[..., :64]  # not contiguous
    try:
        out = make_quantized_kernel(name, values, scales)(x)
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"no {name} kernel here: {error}")
    exact = x.double() @ (values.double() * scales.double()[:, None]).T
    assert out.dtype == dtype
    assert out.shape == (1, rows, 96)
    assert (out.double() - exact).abs().max() <= exact.abs().max() * (1e-5 if dtype == torch.float32 else 2**-7)


def test_a_layer_with_a_bias_and_its_weight() -> None:
    torch.manual_seed(0)
    linear, bare = nn.Linear(64, 96).requires_grad_(False), nn.Linear(64, 96, bias=False).requires_grad_(False)
    x = torch.randn(2, 3, 64)
    assert torch.allclose(QuantizedLinear(linear)(x), linear(x), atol=0.02)
    weight = QuantizedLinear(bare).weight
    values, scales = quantize_rows(bare.weight)
    assert torch.equal(weight, values * scales[:, None])
    with pytest.raises(AssertionError, match="inference"):
        QuantizedLinear(linear)(x.requires_grad_())


def test_a_target_is_another_one_but_close(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    stored, quantised = (load_target(tmp_path, "float32", weights=weights) for weights in ("stored", "int8"))
    assert quantised.digest != stored.digest
    assert quantised.stored_digest == stored.digest
    assert (quantised.ends_digest, stored.stored_digest) == (stored.ends_digest, None)
    kinds = [type(m) for m in quantised.decoder.modules()]
    assert kinds.count(QuantizedLinear) == 4 * 4 + 1
    assert nn.Linear not in kinds
    rows = [[6, 7, 8, 9, 10, 11, 12], [20, 13, 6]]
    states = zip(stored.states()(rows, ()), quantised.states()(rows, ()), strict=True)
    for exact, rounded in states:
        ours, theirs = (t.decoder.logits(s.last_hidden) for t, s in ((stored, exact), (quantised, rounded)))
        assert 0 < (ours - theirs).norm() < 0.1 * ours.norm()
