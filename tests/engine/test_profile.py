"""Costs: measured on a tiny pair, fitted, written in all shapes, read back, and used by an engine and the commands."""

import json
import logging
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark import cli
from dspark.drafters.layouts.calibration import Calibration
from dspark.drafters.layouts.deepspec import write_drafter
from dspark.engine.config import EngineSettings, ModelOptions, PlanOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import open_engine
from dspark.engine.profile import (
    Effort,
    Sample,
    additive_of,
    diagonal_of,
    fit_additive,
    isotonic,
    measure_costs,
    read_costs,
    write_costs,
)
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError
from dspark.spec.cost import profile_dict

TINY = Effort(warm_up=1, rounds=3, widths=3, context=16)
SETTINGS = EngineSettings(max_batch=3, max_length=64, block_size=4)


@pytest.fixture(scope="module")
def pair(target, make_drafter):
    return target, make_drafter(target.decoder, enable_confidence_head=True)


@pytest.fixture(scope="module")
def costs(pair):
    return measure_costs(*pair, SETTINGS, TINY)


@pytest.fixture(scope="module")
def drafter_path(pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafters") / "tiny"
    write_drafter(pair[1], path, torch.float32, {"target_digest": pair[0].digest})
    return path


def test_every_kind_of_round_is_measured(costs):
    assert costs.plain.bs_probes == costs.draft.bs_probes == costs.verify.bs_probes == (1, 2, 3)
    assert costs.verify.m_probes[-1] == 3 * 5
    assert costs.measured["num_drafts"] == 4
    assert min(costs.plain.seconds) > 0
    assert min(costs.draft.seconds) > 0
    for size in (1, 2, 3):
        rows = np.arange(size, 5 * size + 1)
        assert (np.diff(costs.seconds(size, np.full_like(rows, size), rows)) >= 0).all(), "more rows never take less"


def test_measuring_says_nothing_of_the_drafter(pair, caplog):
    """Drafts of made-up requests are hardly ever accepted."""
    with caplog.at_level(logging.WARNING, "dspark"):
        measure_costs(*pair, SETTINGS, TINY._replace(rounds=20))
    assert not caplog.messages


def test_an_additive_law_is_found_again():
    samples = [Sample(r, r, m, 0.1, 2.0 + 0.3 * r + 0.05 * m) for r in (1, 2, 4) for m in (r, 2 * r, 4 * r)]
    fitted = fit_additive(samples)
    for s in samples:
        assert fitted.seconds(s.num_requests, np.array([s.num_rows]))[0] == pytest.approx(s.other_seconds, rel=0.02)


def test_neighbours_that_fall_are_pooled():
    assert isotonic(np.array([1.0, 3.0, 2.0, 5.0, 4.0]), np.array([1, 1, 3, 1, 1])).tolist() == [
        1,
        2.25,
        2.25,
        4.5,
        4.5,
    ]


def test_files_hold_what_was_measured(costs, tmp_path):
    write_costs(tmp_path / "costs.json", costs)
    again = read_costs(tmp_path / "costs.json")
    rows = np.arange(2, 11)
    assert np.array_equal(again.seconds(2, rows * 0 + 2, rows), costs.seconds(2, rows * 0 + 2, rows))
    assert again.measured == costs.measured


def test_sglang_tables_count_drafting_in(costs, tmp_path):
    diagonal, additive = diagonal_of(costs, 3, 5), additive_of(costs, 3, 5)
    assert set(profile_dict(diagonal)) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    assert diagonal.sample_batch_tokens == (5, 10, 15)
    fields = {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}
    assert set(profile_dict(additive)) == fields
    for size in (1, 2, 3):
        rows = np.array([2 * size, 5 * size])
        whole = costs.seconds(size, np.array([size, size]), rows)
        assert additive.seconds(size, rows).tolist() == pytest.approx(whole.tolist())
    for table in (diagonal, additive):
        write_costs(tmp_path / "sps.json", table)
        assert read_costs(tmp_path / "sps.json").verify == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"costs .*: cannot be read .*dspark profile"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"verify": {}}', "expected the fields"),
    ],
)
def test_bad_files_are_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_costs(tmp_path / "costs.json")


def test_an_engine_takes_a_file_or_measures(pair, costs, tmp_path):
    write_costs(tmp_path / "costs.json", costs)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = Engine(pair[0]).generate([[3, 1, 4]], params)
    for source in (tmp_path / "costs.json", "measure"):
        settings = EngineSettings(max_batch=1, max_length=64, planner="early_stop", costs=source)
        engine = Engine(*pair, settings)
        assert engine.generate([[3, 1, 4]], params)[0].token_ids == plain[0].token_ids
        assert engine.round_time_errors, "rounds were planned by costs"


def test_costs_of_other_circumstances_are_told(pair, costs, tmp_path, caplog):
    settings = EngineSettings(max_batch=1, max_length=64, planner="lagged", costs=tmp_path / "costs.json")
    write_costs(settings.costs, costs)
    with caplog.at_level(logging.WARNING, "dspark"):
        Engine(*pair, settings)
        assert "measured with other" not in caplog.text
        write_costs(settings.costs, replace(costs, measured={**costs.measured, "threads": 99}))
        Engine(*pair, settings)
    assert "measured with other threads" in caplog.text


def test_options_name_the_plan(tmp_path):
    assert PlanOptions().apply(SETTINGS).planner == "static"
    planned = PlanOptions(costs=tmp_path / "costs.json").apply(SETTINGS)
    assert (planned.planner, planned.costs) == ("early_stop", tmp_path / "costs.json")
    assert PlanOptions(planner="lagged").apply(SETTINGS).planner == "lagged"


def test_a_calibration_beside_the_drafter_is_applied(pair, drafter_path, costs, tmp_path):
    calibration = Calibration(
        drafter_digest=open_engine(options(pair, drafter_path), SETTINGS).drafter.digest,
        target="tiny",
        target_digest=pair[0].digest,
        temperatures=(1.5, 2.0, 0.5, 1.0),
        sampling_temperatures=(1.0,),
        prompts=(),
        num_rounds=10,
        num_held_out_rounds=0,
        ece_before=(0.1,) * 4,
        ece_after=(0.1,) * 4,
    )
    calibration.write(drafter_path)
    write_costs(tmp_path / "costs.json", costs)
    planned = PlanOptions(costs=tmp_path / "costs.json").apply(SETTINGS)
    assert open_engine(options(pair, drafter_path), planned)._round.planner.temperatures == (1.5, 2.0, 0.5, 1.0)
    assert open_engine(options(pair, drafter_path), SETTINGS)._round.planner.temperatures is None
    own = planned.replace(confidence_temperatures=(1.0,) * 4)
    assert open_engine(options(pair, drafter_path), own)._round.planner.temperatures == (1.0,) * 4


def test_an_engine_drafts_as_few_as_its_settings_or_its_options_say(pair, drafter_path):
    named, few = options(pair, drafter_path), SETTINGS.replace(num_draft_tokens=2)
    assert open_engine(named, few)._round.runner.num_drafts == 2
    assert open_engine(named.replace(num_draft_tokens=1), few)._round.runner.num_drafts == 1


def options(pair, drafter_path) -> ModelOptions:
    return ModelOptions(target=pair[0].name, drafter=str(drafter_path), dtype="float32")


def test_the_command_writes_what_generate_reads(pair, drafter_path, tmp_path, monkeypatch, capsys):
    models = ["--target", pair[0].name, "--drafter", str(drafter_path), "--dtype", "float32"]

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dspark", *arguments, *models])
        cli.main()
        return capsys.readouterr().out

    for shape in ("diagonal", "rounds"):
        profile = ["profile", "--quick", "--max-batch", "2", "--shape", shape, "--out", str(tmp_path / "costs.json")]
        told = json.loads(run(*profile, "--json"))
        assert [row["requests"] for row in told["rounds"]] == [1, 2]
        assert all(row["break_even_accepted_length"] > 0 for row in told["rounds"])
    assert "verify" in json.loads((tmp_path / "costs.json").read_text())
    answer = ["generate", "abc", "--raw", "--max-tokens", "8", "--ignore-eos", "--no-compare", "--no-color"]
    without, planned = run(*answer), run(*answer, "--costs", str(tmp_path / "costs.json"))
    assert without.splitlines()[:-1] == planned.splitlines()[:-1], "all but the figures"
