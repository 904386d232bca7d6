"""Flex attention against plain products: the same outputs and gradients, whatever a row may see."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import flex_attention

from dspark.drafters.backbone import Execution
from dspark.drafters.base import Drafter

CHAIN = {"algorithm": "eagle3", "num_hidden_layers": 1, "mask_token_id": None, "markov_rank": 0, "ttt_length": 3}
CHAIN |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
SLIDING = {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention")}
VARIANTS: dict[str, dict[str, object]] = {
    "bidirectional": {},
    "causal": {"block_attention": "causal"},
    "sliding": SLIDING,
    "causal sliding, one key head": SLIDING | {"block_attention": "causal", "num_key_value_heads": 1},
    "gemma4": {"layer_style": "gemma4", "attention_k_eq_v": True},
    "chain": CHAIN,
}


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses gradients of flex attention on the CPU, whose kernel has none; its plain implementation does."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"})


def trained(drafter: Drafter, execution: Execution) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of a packed row and a padded one, and the gradient of a fixed mix of them."""
    torch.manual_seed(5)
    ids, features = torch.randint(0, 40, (2, 24)), torch.randn(2, 24, 3, 32)
    segment_ids = torch.tensor([[0] * 9 + [1] * 15, [0] * 20 + [-1] * 4])
    anchors = torch.tensor([[1, 2, 8, 10, 11, 22], [1, 5, 6, 18, 0, 0]])
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    drafter.backbone.execution = execution
    drafter.zero_grad()
    hidden = drafter.train_hidden(ids, features, anchors, valid, segment_ids)
    (hidden * torch.randn(hidden.shape))[valid].sum().backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    return hidden.detach()[valid], grads


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # tracing looks at it
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("name", VARIANTS)
def test_flex_is_the_plain_product(make_drafter: Callable[..., Drafter], name: str) -> None:
    drafter = make_drafter(**VARIANTS[name])
    expected, gradients = trained(drafter, Execution("matmul"))
    got, grads = trained(drafter, Execution("flex"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == gradients.keys()
    for key, value in gradients.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_under_autocast(make_drafter: Callable[..., Drafter]) -> None:
    """Queries and keys come out of their rotation in another dtype than values: flex wants one."""
    drafter = make_drafter()
    exact, _ = trained(drafter, Execution("matmul"))
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = trained(drafter, Execution("matmul"))
        got, grads = trained(drafter, Execution("flex"))
    torch.testing.assert_close(got, expected, rtol=0, atol=float((expected - exact).abs().max()))
    for key, value in gradients.items():
        assert (grads[key] - value).norm() < 0.05 * value.norm(), key


@pytest.mark.parametrize("name", ["sliding", "chain"])
def test_a_layer_run_again_in_backward_changes_no_bit(make_drafter: Callable[..., Drafter], name: str) -> None:
    drafter = make_drafter(**VARIANTS[name])
    expected, gradients = trained(drafter, Execution())
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    for layer in drafter.backbone.layers:
        layer.register_forward_pre_hook(count)
    got, grads = trained(drafter, Execution(checkpointing=True))
    assert runs == 2 * (3 if name == "chain" else 2), "forward, and again in backward"
    assert torch.equal(got, expected)
    assert all(torch.equal(grads[key], value) for key, value in gradients.items())
