"""Training EAGLE-3: the objective against its definition, the algorithm's own defaults, and that it learns."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_training
import torch
import torch.nn.functional as F
from tiny_training import TAPS, Row

from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.factory import make_drafter
from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.training import losses
from dspark.training.batch import TrainBatch, collate
from dspark.training.build import drafter_config
from dspark.training.config import DrafterShape, LossMix, TrainSettings
from dspark.training.objective import Weighting, micro_objective
from dspark.training.parallel import Ranks
from dspark.training.trainer import Trainer

SHAPE = {"algorithm": "eagle3", "ttt_length": 3, "markov_rank": 0}


def settings(**drafter: object) -> TrainSettings:
    return TrainSettings.from_dict({"cache": [], "out": "x", "drafter": {"algorithm": "eagle3"} | drafter}, "test")


def test_defaults_are_the_algorithms() -> None:
    run = settings()
    assert run.loss == LossMix(ce=0, soft_ce=1, l1=0, confidence=0)
    assert (run.drafter.num_hidden_layers, run.drafter.ttt_length, run.drafter.markov_rank) == (1, 7, 0)
    weights = np.exp(-np.arange(4) / run.slot_decay)
    assert weights == pytest.approx([1, 0.8, 0.64, 0.512])
    assert np.exp(-np.arange(4) / settings(step_loss_decay=1.0).slot_decay) == pytest.approx([1, 1, 1, 1])
    mixed = TrainSettings.from_dict(
        {"cache": [], "out": "x", "drafter": {"algorithm": "eagle3"}, "loss": {"l1": 0.5}}, "test"
    )
    assert mixed.loss == LossMix(ce=0, soft_ce=1, l1=0.5, confidence=0)
    flash = TrainSettings.from_dict(
        {"cache": [], "out": "x", "drafter": {"algorithm": "dflash", "mask_token_id": 1}}, "test"
    )
    assert flash.loss == LossMix(ce=1, l1=0, confidence=0)
    assert flash.slot_decay == 4.0
    with pytest.raises(ConfigError, match=r"loss\.decay is for block drafters"):
        TrainSettings.from_dict({"cache": [], "out": "x", "drafter": {"algorithm": "eagle3"}, "loss": {"decay": 3}}, "")
    dspark = TrainSettings.from_dict({"cache": [], "out": "x", "drafter": {"mask_token_id": 1}}, "test")
    assert dspark.loss == LossMix()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_hidden_layers": 2}, "one layer"), ({"markov_rank": 4}, "markov_rank"), ({"ttt_length": 0}, "ttt_length")],
)
def test_what_a_chain_cannot_be_is_refused(target: Decoder, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_config(DrafterShape.from_dict({"algorithm": "eagle3"} | change, "test"), target, TAPS)


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_the_objective_is_its_definition(
    target: Decoder, rows: list[Row], monkeypatch: pytest.MonkeyPatch, own_lm_head: bool
) -> None:
    """sum over anchors and steps of 0.8 ** k * soft cross-entropy with the target's law, and its gradients."""
    monkeypatch.setattr(losses, "CHUNK", 8)
    torch.manual_seed(2)
    shape = DrafterShape.from_dict(SHAPE | {"draft_vocab_size": 25, "own_lm_head": own_lm_head}, "test")
    kept = torch.randperm(40)[:25].sort().values
    drafter = make_drafter(drafter_config(shape, target, TAPS), target, kept)
    assert isinstance(drafter, Eagle3Drafter)
    if own_lm_head:
        torch.nn.init.normal_(drafter.lm_head_weight, std=0.3)
    batch = collate(rows[:3], 6, 3, np.random.default_rng(0))
    index = torch.full((40,), -1).index_copy(0, kept, torch.arange(25))
    mix = LossMix(ce=0, soft_ce=1, l1=0, confidence=0)
    objective = micro_objective(drafter, target, batch, Weighting(mix, settings().slot_decay, index))
    objective.loss.backward()
    got = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    assert got.keys() == dict(drafter.named_parameters()).keys(), "every parameter is trained"

    drafter.zero_grad()
    expected = torch.zeros(())
    for b, anchor, k in batch.slot_mask.nonzero().tolist():
        one = slice(b, b + 1)
        at = batch.anchors[b, anchor]
        chain = drafter.train_hidden(batch.token_ids[one], batch.features[one], at[None, None], torch.tensor([[True]]))
        log_q = F.log_softmax(chain[0, 0, k] @ drafter.lm_head_weight.T, dim=-1)
        p = target.logits(batch.last_hidden[b, at + k].float()).softmax(-1)[kept]
        expected = expected - 0.8**k * (p * log_q).sum()
    expected.backward()
    torch.testing.assert_close(objective.loss, expected, rtol=1e-3, atol=1e-3)
    for name, p in drafter.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(got[name], p.grad, rtol=1e-2, atol=1e-3 * float(p.grad.abs().max()), msg=name)


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_it_learns_and_goes_on(
    target: Decoder, rows: list[Row], tmp_path: Path, alone: Ranks, own_lm_head: bool
) -> None:
    shape = SHAPE | {"own_lm_head": own_lm_head}

    def make(out: str) -> Trainer:
        changes = {"max_steps": 40, "save_every": 20}
        return tiny_training.make_trainer(target, rows, tmp_path / out, alone, shape, changes)

    whole = make("whole")
    whole.run()
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    seen = tiny_training.losses(tmp_path / "whole")
    assert np.mean(seen[-5:]) < np.mean(seen[:5])
    # Most of a soft cross-entropy is the target's own entropy: what is left of the distance says more.
    for name in ("accept/1", "accept/3"):
        missed = [1 - line[name] for line in lines]
        assert np.mean(missed[-5:]) < 0.8 * np.mean(missed[:5]), name

    cut = make("cut")
    load_step = cut.load_step

    def stopping(step: int) -> list[TrainBatch]:
        cut.stop_requested = step == 6
        return load_step(step)

    cut.load_step = stopping  # type: ignore[method-assign]
    cut.run()
    again = make("cut")
    again.run()
    assert tiny_training.losses(tmp_path / "cut") == seen
    for name, value in whole.drafter.named_parameters():
        assert torch.equal(dict(again.drafter.named_parameters())[name], value), name
