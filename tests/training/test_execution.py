"""Checkpointed, compiled, or as it is: the same losses; and settings that a device cannot serve are refused."""

from pathlib import Path

import pytest
import torch
from tiny_training import Samples, losses, make_trainer

from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.training.config import TrainSettings
from dspark.training.execution import attention_kind
from dspark.training.parallel import Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CHAIN = {"algorithm": "eagle3", "ttt_length": 3, "markov_rank": 0, "mask_token_id": None}


@pytest.mark.parametrize("shape", [{"num_hidden_layers": 2}, CHAIN], ids=["block", "chain"])
def test_checkpointed_losses_are_the_same_to_the_bit(
    target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks, shape: dict[str, object]
) -> None:
    for name, changes in (("plain", {}), ("checkpointed", {"activation_checkpointing": True})):
        make_trainer(target, rows, tmp_path / name, alone, shape, {"max_steps": 4} | changes).run()
    assert losses(tmp_path / "checkpointed") == losses(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # tracing looks at it
def test_compiled_losses_are_the_same_up_to_rounding(
    target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks
) -> None:
    """Batches of several lengths, and layers that also run again in backward."""
    changes: dict[str, object] = {"max_steps": 4}
    make_trainer(target, rows, tmp_path / "plain", alone, {}, changes).run()
    changes |= {"compile": "eager", "activation_checkpointing": True}
    trainer = make_trainer(target, rows, tmp_path / "compiled", alone, {}, changes)
    torch._dynamo.utils.counters.clear()
    trainer.run()
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1, "nothing was compiled"
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_how_a_run_is_executed_is_no_other_run(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    make_trainer(target, rows, tmp_path, alone, {}, {"max_steps": 2}).run()
    changes: dict[str, object] = {"max_steps": 2, "activation_checkpointing": True, "attention": "matmul"}
    again = make_trainer(target, rows, tmp_path, alone, {}, changes)
    again.resume()
    assert again.step == 2


def test_attention_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(attention: str) -> TrainSettings:
        recipe = {"cache": ["c"], "out": "o", "drafter": {"mask_token_id": 1}, "attention": attention}
        return TrainSettings.from_dict(recipe, "test")

    assert attention_kind(settings("auto"), CPU) == "matmul"
    with pytest.raises(ConfigError, match="attention: flex is for CUDA, and this run is on cpu"):
        attention_kind(settings("flex"), CPU)
    for capability, kind in (((7, 5), "matmul"), ((8, 0), "flex"), ((9, 0), "flex")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert attention_kind(settings("auto"), CUDA) == kind
    assert attention_kind(settings("matmul"), CUDA) == "matmul"
