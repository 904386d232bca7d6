"""The best checkpoint is kept and found again; a run ends when nothing gets better; drafters to start from."""

from pathlib import Path

import pytest
import torch
from tiny_training import TAPS, Samples, losses, make_trainer

from dspark.drafters.base import Drafter
from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.stages import only_run
from dspark.training.build import drafter_config, freeze, new_drafter, warm_start
from dspark.training.config import DrafterShape
from dspark.training.parallel import Ranks
from dspark.training.trainer import Trainer


class Judge:
    """Gives the values it was told, in turn."""

    def __init__(self, *values: float) -> None:
        self.values, self.seen = list(values), []

    def __call__(self, path: Path) -> float:
        self.seen.append(torch.load(path / "drafter.pt"))
        return self.values[len(self.seen) - 1]


def judged(target: Decoder, rows: Samples, out: Path, ranks: Ranks, judge: Judge, **changes: object) -> Trainer:
    held_out = {"prompts": ["unused.jsonl"], "every": 2} | {k: changes.pop(k) for k in ("patience",) if k in changes}
    return make_trainer(target, rows, out, ranks, {}, changes | {"held_out": held_out}, judge)


def test_best_and_last_are_kept(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    judge = Judge(1.5, 1.9, 1.7, 1.8)
    judged(target, rows, tmp_path, alone, judge).run()
    best, last = (torch.load(tmp_path / name / "drafter.pt") for name in ("best", "last"))
    assert all(torch.equal(value, judge.seen[1][name]) for name, value in best.items())
    assert not all(torch.equal(value, last[name]) for name, value in best.items())


def test_a_step_that_measures_and_saves_writes_one_checkpoint(
    target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks
) -> None:
    trainer = judged(target, rows, tmp_path, alone, Judge(1.5, 1.9, 1.7, 1.8), save_every=4)
    export, steps = trainer.export, []

    def counted(drafter: Drafter, path: Path) -> None:
        steps.append(trainer.step)
        export(drafter, path)

    trainer.export = counted
    trainer.run()
    assert steps == [2, 4, 6, 8]
    last = torch.load(tmp_path / "last" / "drafter.pt")
    assert all(torch.equal(p, last[name]) for name, p in trainer.drafter.named_parameters())


def test_a_run_that_gets_no_better_ends(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    trainer = judged(target, rows, tmp_path, alone, Judge(1.5, 1.4, 1.3, 9.9), patience=2)
    trainer.run()
    assert trainer.step == 6
    assert trainer.best.step == 2


def test_a_resumed_run_remembers_its_best(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    trainer = judged(target, rows, tmp_path, alone, Judge(1.5, 1.4))
    select = trainer.select

    def stop_at_four(sums: object) -> None:
        select(sums)
        trainer.stop_requested = trainer.step == 4

    trainer.select = stop_at_four
    trainer.run()
    again = judged(target, rows, tmp_path, alone, Judge(1.45, 1.2))
    again.run()
    assert (again.best.accepted_length, again.best.step, again.best.misses) == (1.5, 2, 3)
    assert len(losses(tmp_path)) == 8


def made(target: Decoder, rows: Samples, **shape: object) -> Drafter:
    recipe = DrafterShape.from_dict({"num_hidden_layers": 1, "block_size": 3, "mask_token_id": 1} | shape, "test")
    return new_drafter(drafter_config(recipe, target, TAPS), target, rows, seed=3)


def test_dflash_becomes_dspark(target: Decoder, rows: Samples) -> None:
    """All of its weights are kept, the draft vocabulary too; a fresh Markov head changes no logit."""
    dflash = made(target, rows, algorithm="dflash", draft_vocab_size=30)
    wanted = made(target, rows, draft_vocab_size=30, markov_rank=4, block_size=5).config
    dspark = warm_start(dflash, wanted, target, seed=0)
    assert dspark.num_drafts == 5
    assert torch.equal(dspark.token_ids, dflash.token_ids)
    weights = dict(dspark.named_parameters())
    for name, value in dflash.named_parameters():
        assert torch.equal(weights[name], value), name
    assert not dspark.markov_head.markov_w2.weight.any()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_hidden_layers": 2}, "init_from has num_hidden_layers 1 but the recipe's drafter 2"),
        ({"markov_rank": 8}, "set drafter.markov_rank"),
        ({"draft_vocab_size": 20}, "init_from has draft_vocab_size 30"),
        ({"num_key_value_heads": 4}, "init_from has num_key_value_heads 2"),
    ],
)
def test_weights_that_are_not_there_are_refused(
    target: Decoder, rows: Samples, shape: dict[str, object], message: str
) -> None:
    base = {"markov_rank": 4, "draft_vocab_size": 30}
    with pytest.raises(ConfigError, match=message):
        warm_start(made(target, rows, **base), made(target, rows, **(base | shape)).config, target, seed=0)


CHAIN = {"algorithm": "eagle3", "draft_vocab_size": 30}


def test_a_chain_goes_on_with_other_lengths_and_a_head_of_its_own(target: Decoder, rows: Samples) -> None:
    """What a recipe cannot name, such as the norms of an original, is kept; the fresh head is the target's."""
    config = made(target, rows, **CHAIN, ttt_length=3).config.replace(qk_norm=False)
    read = new_drafter(config, target, rows, seed=4)
    wanted = made(target, rows, **CHAIN, ttt_length=5, own_lm_head=True).config
    chain = warm_start(read, wanted, target, seed=0)
    assert (chain.num_drafts, chain.config.qk_norm) == (5, False)
    weights = dict(chain.named_parameters())
    for name, value in read.named_parameters():
        assert torch.equal(weights[name], value), name
    assert torch.equal(chain.lm_head_weight, chain.target_lm_head_weight)
    with pytest.raises(ConfigError, match="init_from has own_lm_head True"):
        warm_start(chain, read.config, target, seed=0)


@pytest.mark.parametrize("block", [{"algorithm": "dflash"}, {"markov_rank": 4}])
def test_a_chain_and_a_block_are_not_each_others_start(
    target: Decoder, rows: Samples, block: dict[str, object]
) -> None:
    chain, other = made(target, rows, **CHAIN), made(target, rows, draft_vocab_size=30, **block)
    for read, wanted in ((chain, other), (other, chain)):
        message = f"init_from has algorithm '{read.config.algorithm}' .* '{wanted.config.algorithm}'"
        with pytest.raises(ConfigError, match=message):
            warm_start(read, wanted.config, target, seed=0)


def test_frozen_parameters_stay(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    plain = make_trainer(target, rows, tmp_path / "plain", alone, {}, {})
    before = {name: p.detach().clone() for name, p in plain.drafter.named_parameters()}
    freeze(plain.drafter, ("backbone", "confidence_head"))
    frozen = Trainer(plain.settings, target, plain.drafter, plain.samples, plain.export, alone)
    frozen.run()
    moved = {name for name, p in frozen.drafter.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(name.startswith("markov_head") for name in moved)


def test_what_cannot_be_frozen_is_named(target: Decoder, rows: Samples) -> None:
    drafter = made(target, rows)
    with pytest.raises(ConfigError, match="no parameter begins with 'bakbone'; the drafter has backbone"):
        freeze(drafter, ("bakbone",))
    with pytest.raises(ConfigError, match="nothing is left"):
        freeze(drafter, ("",))


def test_two_runs_do_not_share_a_directory(tmp_path: Path, alone: Ranks) -> None:
    with (
        only_run(tmp_path, alone),
        pytest.raises(ConfigError, match="is written by another"),
        only_run(tmp_path, alone),
    ):
        pass
    with only_run(tmp_path, alone):
        pass
