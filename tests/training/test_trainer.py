"""The training loop: it learns, and a run that was cut off goes on as if it had not been."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_training
import torch
from tiny_training import TAPS, Samples

from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.training.batch import collate
from dspark.training.build import drafter_config, frequent_tokens
from dspark.training.config import DrafterShape
from dspark.training.parallel import Ranks
from dspark.training.trainer import Trainer

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> MakeTrainer:
    def make(output: str = "run", shape: dict[str, object] | None = None, **changes: object) -> Trainer:
        return tiny_training.make_trainer(target, rows, tmp_path / output, alone, shape or {}, changes)

    return make


def losses(trainer: Trainer) -> list[float]:
    return tiny_training.losses(trainer.settings.out)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_it_learns(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(shape={"markov_head_type": kind, "draft_vocab_size": 30}, max_steps=40)
    trainer.run()
    seen = losses(trainer)
    assert np.mean(seen[-5:]) < 0.9 * np.mean(seen[:5])


@pytest.mark.parametrize(
    "shape",
    [
        {"draft_vocab_size": 30},
        {"algorithm": "eagle3", "ttt_length": 3, "markov_rank": 0, "mask_token_id": None, "own_lm_head": True},
    ],
    ids=["block", "chain"],
)
def test_bfloat16_is_near_float32(make_trainer: MakeTrainer, shape: dict[str, object]) -> None:
    """The default: products in bfloat16, master weights in float32."""
    runs = {dtype: make_trainer(dtype, shape, max_steps=4, compute_dtype=dtype) for dtype in ("float32", "bfloat16")}
    for trainer in runs.values():
        trainer.run()
    assert losses(runs["bfloat16"]) == pytest.approx(losses(runs["float32"]), rel=0.01)
    assert {p.dtype for p in runs["bfloat16"].drafter.parameters()} == {torch.float32}


def test_resume_is_bit_for_bit(make_trainer: MakeTrainer) -> None:
    """Cut off between two checkpoints: the steps after the last one are run again, with the very same losses."""
    whole = make_trainer("whole")
    whole.run()
    cut = make_trainer("cut")
    train_step, steps = cut.train_step, 0

    def killed(batches: list) -> object:
        nonlocal steps
        if steps == 5:
            raise SystemExit  # the process dies: nothing may be saved
        steps += 1
        return train_step(batches)

    cut.train_step = killed  # type: ignore[method-assign, assignment]
    cut.save, real_save = (lambda: real_save() if steps < 5 else None), cut.save  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        cut.run()
    again = make_trainer("cut")
    again.run()
    assert again.step == 8
    assert losses(again) == losses(whole)
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(again.drafter.state_dict()[name], value), name


def test_a_stopped_run_saves_and_goes_on(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.stop_requested = True
    trainer.run()
    assert trainer.step == 0
    again = make_trainer()
    again.run()
    assert again.step == 8


def test_other_settings_are_refused(make_trainer: MakeTrainer) -> None:
    make_trainer(max_steps=2).run()
    with pytest.raises(CheckpointError, match="other settings"):
        make_trainer(max_steps=2, learning_rate=1e-4).run()


def test_a_damaged_state_is_named(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=2)
    trainer.run()
    state = next((trainer.settings.out / "states").glob("step-*")) / "__0_0.distcp"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-00000002: cannot be read"):
        make_trainer(max_steps=2).run()


def test_two_micro_batches_give_the_gradient_of_one(make_trainer: MakeTrainer) -> None:
    """Each term is a sum over the whole step divided once, not a mean of means."""
    parts = make_trainer("parts", batch_size=2, accumulation=2, num_anchors=100)
    whole = make_trainer("whole", batch_size=4, accumulation=1, num_anchors=100)
    indices = [[0, 1], [2, 3]]
    micro = [collate([parts.samples[i] for i in pair], 100, 3, np.random.default_rng(0)) for pair in indices]
    joint = [collate([whole.samples[i] for pair in indices for i in pair], 100, 3, np.random.default_rng(0))]
    grads = []
    for trainer, batches in ((parts, micro), (whole, joint)):
        trainer.optimizer.zero_grad = lambda **_: None  # type: ignore[method-assign, assignment]
        trainer.train_step(batches)
        grads.append([p.grad for p in trainer.drafter.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_draft_vocabulary_is_the_most_frequent(rows: Samples) -> None:
    kept = frequent_tokens(rows, 40, 10)
    counts = np.zeros(40)
    for row in rows:
        np.add.at(counts, row.token_ids.numpy()[row.loss_mask.numpy().astype(bool)], 1)
    assert len(kept) == 10
    assert counts[kept.numpy()].min() >= np.delete(counts, kept.numpy()).max()


def test_layers_that_the_cache_lacks_are_refused(target: Decoder) -> None:
    with pytest.raises(ConfigError, match="target_layer_ids"):
        drafter_config(DrafterShape(mask_token_id=1, target_layer_ids=(1,)), target, TAPS)


def test_a_gemma4_target_gets_the_layers_of_the_public_drafters(target: Decoder) -> None:
    shared = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = target.config.replace(local_rope=target.config.rope, final_logit_softcapping=30.0, **shared)
    drafter = drafter_config(DrafterShape(mask_token_id=1), Decoder(config), TAPS)
    assert (drafter.layer_style, drafter.head_dim, drafter.num_key_value_heads) == ("gemma4", 16, 1)
    assert drafter.attention_k_eq_v
    assert drafter.final_logit_softcapping == 30.0
    assert drafter_config(DrafterShape(mask_token_id=1), target, TAPS).layer_style == "qwen3"


def test_a_tracker_that_is_not_installed_is_named(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb_project is set, but wandb is not installed: pip install wandb"):
        make_trainer(wandb_project="drafters").run()


def test_metrics_tell_memory_and_waiting(make_trainer: MakeTrainer) -> None:
    report = make_trainer(max_steps=2).run()
    assert report.step == report.total_steps == 2
    assert 0.05 < report.figures["memory_gib"] < 64
    assert 0 <= report.figures["data_wait_share"] < 1
    assert {"loss", "tau", "accept/1", "confidence_bias", "tokens_per_second"} <= report.figures.keys()
