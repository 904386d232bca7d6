"""Fused losses against a plain float64 computation differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.training import losses
from dspark.training.config import LossMix
from dspark.training.losses import HeadWeights, SlotTargets, confidence_loss, draft_losses

V, H, R, N, M = 50, 12, 5, 37, 20
MIXES = {
    "ce": LossMix(ce=1.0, soft_ce=0.0, l1=0.0),
    "soft_ce": LossMix(ce=0.0, soft_ce=1.0, l1=0.0),
    "l1": LossMix(ce=0.0, soft_ce=0.0, l1=1.0),
    "release": LossMix(),
    "all": LossMix(ce=0.3, soft_ce=0.5, l1=0.7),
}


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def problem(reduced: bool, cap: float | None = None) -> tuple[dict[str, Tensor], SlotTargets]:
    torch.manual_seed(3)
    full_head = torch.randn(V, H)
    kept = torch.randperm(V)[:31] if reduced else torch.arange(V)
    target_hidden = torch.randn(M, H)
    label = torch.randint(0, V, (N,))
    index = torch.full((V,), -1)
    index[kept] = torch.arange(len(kept))
    targets = SlotTargets(
        hidden=target_hidden,
        log_normalizer=capped(target_hidden @ full_head.T, cap).logsumexp(-1),
        position=torch.randint(0, M, (N,)),
        label=index[label],
        weight=torch.rand(N) * (torch.rand(N) > 0.2),
    )
    leaves = {"hidden": torch.randn(N, H), "feature": torch.randn(N, R), "w2": torch.randn(len(kept), R)}
    return leaves | {"head": full_head[kept], "full_head": full_head, "kept": kept, "token": label}, targets


def reference(
    x: dict[str, Tensor], targets: SlotTargets, mix: LossMix, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Every law over the FULL vocabulary, in float64: (weighted sum, L1 per slot)."""
    p = F.softmax(capped(targets.hidden.double() @ x["full_head"].double().T, cap), dim=-1)[targets.position]
    log_q = F.log_softmax(capped(x["hidden"] @ x["head"].double().T, cap) + x["feature"] @ x["w2"].T, dim=-1)
    q = torch.zeros_like(p).index_copy(1, x["kept"], log_q.exp())
    l1 = (q - p).abs().sum(-1)
    soft = -(p[:, x["kept"]] * log_q).sum(-1)
    ce = torch.stack([-log_q[n, i] if i >= 0 else log_q.new_zeros(()) for n, i in enumerate(targets.label.tolist())])
    return (targets.weight.double() * (mix.ce * ce + mix.soft_ce * soft + mix.l1 * l1)).sum(), l1


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("name", "cap"), [*((name, None) for name in MIXES), ("all", 2.5)])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, name: str, cap: float | None, reduced: bool) -> None:
    monkeypatch.setattr(losses, "CHUNK", 8)
    x, targets = problem(reduced, cap)
    fused = {k: x[k].clone().requires_grad_() for k in ("hidden", "feature", "w2")}
    head = HeadWeights(x["head"], fused["w2"], draft_cap=cap, target_cap=cap)
    out = draft_losses(fused["hidden"], fused["feature"], head, targets, MIXES[name])
    (out.total * 0.5).backward()
    plain = {k: x[k].double().requires_grad_() for k in ("hidden", "feature", "w2")}
    total, l1 = reference(x | plain, targets, MIXES[name], cap)
    (total * 0.5).backward()
    torch.testing.assert_close(out.total.double(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.l1.double(), l1, rtol=1e-5, atol=1e-5)
    for k, leaf in plain.items():
        assert leaf.grad is not None
        assert fused[k].grad is not None
        torch.testing.assert_close(fused[k].grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "cap"), [("release", None), ("all", 2.5)])
def test_products_in_bfloat16(monkeypatch: pytest.MonkeyPatch, name: str, cap: float | None) -> None:
    """Under autocast: near the exact values and gradients, which stay float32."""
    monkeypatch.setattr(losses, "CHUNK", 8)
    x, targets = problem(True, cap)
    x |= {k: x[k] / 4 for k in ("hidden", "feature")}
    leaves = {k: x[k].clone().requires_grad_() for k in ("hidden", "feature", "w2", "head")}
    head = HeadWeights(leaves["head"], leaves["w2"], x["head"], cap, cap)
    with torch.autocast("cpu", torch.bfloat16):
        out = draft_losses(leaves["hidden"], leaves["feature"], head, targets, MIXES[name])
    out.total.backward()
    plain = {k: x[k].double().requires_grad_() for k in leaves}
    total, _ = reference(x | plain, targets, MIXES[name], cap)
    total.backward()
    torch.testing.assert_close(out.total.double(), total, rtol=0.01, atol=0)
    for k, leaf in plain.items():
        assert leaf.grad is not None
        assert leaves[k].grad is not None
        assert leaves[k].grad.dtype == torch.float32
        # A rounded q - p of the other sign turns the gradient of L1 for that token.
        assert (leaves[k].grad - leaf.grad).norm() < 0.1 * leaf.grad.norm(), k


def test_without_a_sequential_head() -> None:
    x, targets = problem(False)
    hidden = x["hidden"].clone().requires_grad_()
    out = draft_losses(hidden, None, HeadWeights(x["head"], None), targets, MIXES["release"])
    out.total.backward()
    plain = x["hidden"].double().requires_grad_()
    zero = {"feature": torch.zeros(N, R).double(), "w2": torch.zeros(V, R).double()}
    total, _ = reference(x | zero | {"hidden": plain}, targets, MIXES["release"])
    total.backward()
    assert plain.grad is not None
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "cap"), [*((name, None) for name in MIXES), ("all", 2.5)])
def test_a_trained_lm_head(monkeypatch: pytest.MonkeyPatch, name: str, cap: float | None) -> None:
    """The drafter's own rows get their gradient; the target's law comes from the target's rows."""
    monkeypatch.setattr(losses, "CHUNK", 8)
    x, targets = problem(True, cap)
    hidden, own = x["hidden"].clone().requires_grad_(), torch.randn(x["head"].shape).requires_grad_()
    out = draft_losses(hidden, None, HeadWeights(own, None, x["head"], cap, cap), targets, MIXES[name])
    (out.total * 0.5).backward()
    plain = {"hidden": x["hidden"].double().requires_grad_(), "head": own.detach().double().requires_grad_()}
    zero = {"feature": torch.zeros(N, R).double(), "w2": torch.zeros(len(own), R).double()}
    total, _ = reference(x | zero | plain, targets, MIXES[name], cap)
    (total * 0.5).backward()
    torch.testing.assert_close(out.total.double(), total, rtol=1e-5, atol=1e-5)
    for leaf, exact in ((hidden, plain["hidden"]), (own, plain["head"])):
        assert leaf.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_confidence_is_pulled_to_the_acceptance_rate() -> None:
    l1 = torch.tensor([0.0, 0.5, 2.0])
    logits = torch.tensor([0.3, -0.2, 1.0], requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 0.5])
    confidence_loss(logits, l1, weight).backward()
    assert logits.grad is not None
    expected = weight * (torch.sigmoid(logits.detach()) - torch.tensor([1.0, 0.75, 0.0]))
    torch.testing.assert_close(logits.grad, expected)
