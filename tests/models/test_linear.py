"""Packed layers give what plain ones give, whichever kernel this machine prefers."""

import pytest
import torch
from torch import nn

from dspark.models.linear import PackedLinear, choose, make_kernel, pack_linears

KERNELS = ["plain", "packed", "packed_float32"]


def kernel_or_skip(name: str, weight: torch.Tensor, bias: torch.Tensor | None):
    try:
        kernel = make_kernel(name, weight, bias)
        kernel(weight[:1])
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"no {name} kernel here: {error}")
    return kernel


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 16, 40])
def test_kernels_agree(name: str, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(96, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    wide = torch.randn(1, rows, 128, generator=generator).to(dtype)
    x = wide[..., :64]  # not contiguous
    kernel = kernel_or_skip(name, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    out = kernel(x)
    assert out.dtype == dtype
    assert out.shape == (1, rows, 96)
    assert (out.double() - exact).abs().max() <= exact.abs().max() * (1e-5 if dtype == torch.float32 else 2**-7)


def test_pack_replaces_large_layers_and_keeps_the_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 640), nn.SiLU(), nn.Linear(640, 512, bias=False), nn.Linear(512, 8))
    model.requires_grad_(False)
    inputs = [torch.randn(1, rows, 512) for rows in (1, 5, 30)]
    plain = [model(x) for x in inputs]
    pack_linears(model)
    for linear, shape in ((model[0], (640, 512)), (model[2], (512, 640))):
        packed = set(choose(*shape, torch.float32, torch.get_num_threads())) != {"plain"}
        assert isinstance(linear, PackedLinear if packed else nn.Linear)
    assert type(model[3]) is nn.Linear  # too small to gain
    for x, wanted in zip(inputs, plain, strict=True):
        assert torch.allclose(model(x), wanted, rtol=1e-4, atol=1e-5)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_LINEAR", "plain")
    model = nn.Sequential(nn.Linear(512, 512))
    pack_linears(model)
    assert type(model[0]) is nn.Linear


def test_machine_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, weight: torch.Tensor, bias: torch.Tensor | None):
        if name == "plain":
            return make_kernel(name, weight, bias)
        raise RuntimeError("not built with oneDNN")

    monkeypatch.setattr("dspark.models.linear.make_kernel", refuse)
    assert choose.__wrapped__(512, 512, torch.bfloat16, 1) == ("plain", "plain")


def test_packed_layers_refuse_to_train() -> None:
    linear = nn.Linear(64, 64)
    kernel_or_skip("packed", linear.weight.detach(), None)
    with pytest.raises(AssertionError, match="inference"):
        PackedLinear(linear, ("packed", "packed"))(torch.randn(2, 64, requires_grad=True))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_comes_back_exactly(name: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 96, bias=False, dtype=dtype)
    kernel_or_skip(name, linear.weight.detach(), None)
    assert torch.equal(PackedLinear(linear, (name, name)).weight, linear.weight)
