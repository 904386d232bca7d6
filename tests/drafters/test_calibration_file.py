"""Calibration files: written whole, read for the drafter they belong to, and in SGLang's form."""

import json
from pathlib import Path

import pytest
import torch

from dspark.drafters.layouts.calibration import Calibration
from dspark.drafters.layouts.deepspec import read_drafter, write_drafter
from dspark.errors import CheckpointError, ConfigError

FIELDS = {
    "target": "tiny",
    "target_digest": "0" * 16,
    "temperatures": (0.5, 1.0, 2.0, 4.0),
    "sampling_temperatures": (1.0,),
    "prompts": ("a.jsonl", "b.jsonl"),
    "num_rounds": 900,
    "num_held_out_rounds": 300,
    "ece_before": (0.1, 0.2, 0.3, 0.4),
    "ece_after": (0.01, 0.02, 0.03, 0.04),
}


def test_a_calibration_comes_back_for_its_drafter(make_drafter, tmp_path: Path) -> None:
    drafter = make_drafter().prepare()
    written = Calibration(drafter_digest=drafter.digest, **FIELDS)
    written.write(tmp_path)
    assert Calibration.read(tmp_path / "calibration.json", drafter) == written


def test_sglang_gets_its_five_fields(make_drafter, tmp_path: Path) -> None:
    Calibration(drafter_digest="x", **FIELDS).write(tmp_path)
    assert json.loads((tmp_path / "calibration.sglang.json").read_text()) == {
        "temperatures": [0.5, 1.0, 2.0, 4.0],
        "dataset": "a.jsonl,b.jsonl",
        "num_samples": 900,
        "ece_before": [0.1, 0.2, 0.3, 0.4],
        "ece_after": [0.01, 0.02, 0.03, 0.04],
    }


def test_the_digest_follows_the_drafter_and_not_its_file(make_drafter, target, tmp_path: Path) -> None:
    trained = make_drafter(draft_vocab_size=32)
    trained.backbone.feature_scale.fill_(0.5)  # folded into fc by the file, and by prepare()
    write_drafter(trained, tmp_path / "d")
    stored = read_drafter(tmp_path / "d", target).prepare()
    assert trained.prepare().digest == stored.digest
    other = read_drafter(tmp_path / "d", target)
    with torch.no_grad():
        other.confidence_head.proj.bias.add_(0.25)
    assert other.prepare().digest != stored.digest
    assert make_drafter().prepare().digest != make_drafter(target_layer_ids=(-1, 0, 2)).prepare().digest


def test_another_drafters_file_is_refused(make_drafter, tmp_path: Path) -> None:
    Calibration(drafter_digest="feedfeedfeedfeed", **FIELDS).write(tmp_path)
    with pytest.raises(CheckpointError, match="drafter_digest: was fitted for drafter feedfeedfeedfeed, not for this"):
        Calibration.read(tmp_path / "calibration.json", make_drafter().prepare())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no such calibration: make it with dspark calibrate"),
        ({"temperatures": [1.0, 0.0, 1.0, 1.0]}, r"temperatures\.1: Input should be greater than 0"),
        ({"ece_after": [0.1]}, "ece_after must have one value for each of the 4 temperatures"),
        ({"speed": 3}, "speed: unknown setting"),
    ],
)
def test_bad_files_are_named(make_drafter, tmp_path: Path, change, message: str) -> None:
    path, drafter = tmp_path / "calibration.json", make_drafter().prepare()
    if change is not None:
        Calibration(drafter_digest=drafter.digest, **FIELDS).write(tmp_path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        Calibration.read(path, drafter)


def test_a_width_that_is_not_the_drafters_is_refused(make_drafter, tmp_path: Path) -> None:
    drafter = make_drafter().prepare()
    short = {name: value[:3] for name, value in FIELDS.items() if name in ("temperatures", "ece_before", "ece_after")}
    Calibration(drafter_digest=drafter.digest, **(FIELDS | short)).write(tmp_path)
    with pytest.raises(CheckpointError, match="has 3, but the drafter drafts 4 tokens"):
        Calibration.read(tmp_path / "calibration.json", drafter)


def test_settings_are_checked_when_made() -> None:
    with pytest.raises(ConfigError, match="num_rounds"):
        Calibration.from_dict(FIELDS | {"drafter_digest": "x", "num_rounds": 0}, "made")
