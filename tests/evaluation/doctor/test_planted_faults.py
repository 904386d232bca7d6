"""Every planted fault is named, and a healthy pair is not accused."""

import json
import sys
from pathlib import Path

import pytest
from planted_faults import FURTHER, PROMPTS, TEN, doctor_options, plant

from dspark import cli
from dspark.engine.config import ModelOptions
from dspark.evaluation.doctor.config import DoctorOptions
from dspark.evaluation.doctor.examine import examine
from dspark.models.hub import home

JUDGED = {"norm skipped", "a target rotated otherwise than its config says"}  # only transformers sees these


@pytest.mark.parametrize("name", [*TEN, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_a_planted_fault_is_named(name: str, pair: Path, tmp_path: Path) -> None:
    what = (TEN | FURTHER)[name]
    diagnosis = plant(what, pair, tmp_path / "planted", transformers=name in JUDGED)
    first = diagnosis.first
    assert first is not None, diagnosis.checks
    assert first.fault == what.fault, first
    assert first.change
    assert diagnosis.exit_code == 1


def test_the_ten_of_the_benchmark_are_named_as_they_are_called() -> None:
    assert len(TEN) == 10
    assert {name: what.fault for name, what in TEN.items()} == {name: name for name in TEN}


def test_a_healthy_pair_passes_every_check(pair: Path) -> None:
    diagnosis = examine(doctor_options(pair))
    assert [check for check in diagnosis.checks if check.status != "ok"] == []
    assert diagnosis.exit_code == 0
    figures = {check.name: check.figures for check in diagnosis.checks}
    assert max(figures["draft logits"]["relative_error_by_slot"]) < 1e-4
    assert figures["rounds"]["rounds_with_the_same"] == 1
    assert figures["acceptance"]["acceptance"] > 0.5
    assert figures["final norm"]["argmax_agreement"] == 1
    ranges = figures["acceptance"]["by_context"]
    assert sum(row["anchors"] for row in ranges) == figures["acceptance"]["anchors"]


def test_rounding_to_bfloat16_is_no_fault(pair: Path) -> None:
    options = doctor_options(pair)
    diagnosis = examine(options.replace(model=options.model.replace(dtype="bfloat16")))
    assert diagnosis.first is None, diagnosis.first
    assert next(c for c in diagnosis.checks if c.name == "draft logits").figures["dtype"] == "bfloat16"


def test_the_command(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Healthy: 0 and a report. A fault: 1 and where it is. No such drafter: 2 and one line."""
    options = doctor_options(pair).model
    common = ["dspark", "doctor", "--target", options.target, "--no-transformers", "--dtype", "float32"]
    common += ["--answer-tokens", "24", "--prompt", *PROMPTS]

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [*common, *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    assert run("--drafter", options.drafter) == 0
    report = capsys.readouterr().out
    assert "healthy" in report
    assert "acceptance by context and slot" in report
    bad = tmp_path / "bad"
    plant(TEN["missing tensor"], pair, bad)
    assert run("--drafter", str(bad / "drafter"), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["fault"], found["place"], found["healthy"]) == ("missing tensor", "drafter files", False)
    assert "layers.0.self_attn.q_norm.weight" in found["checks"][1]["finding"]
    assert run("--drafter", str(bad / "drafter")) == 1
    assert "first fault: missing tensor, at the check of drafter files" in capsys.readouterr().out
    assert run("--drafter", str(tmp_path / "nowhere")) == 2
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_pair_is_healthy() -> None:
    if not (home() / "models" / "smollm2-135m").is_dir():
        pytest.skip("smollm2-135m has not been fetched on this machine: run `dspark generate` once")
    diagnosis = examine(DoctorOptions(model=ModelOptions(dtype="float32")))
    assert diagnosis.first is None, diagnosis.first
