"""The confidence report, from records as the engine keeps them."""

import json
from dataclasses import asdict

import pytest

from dspark.engine.request import RoundRecord
from dspark.errors import DataError
from dspark.evaluation.confidence import ThresholdPoint, confidence_report


def record(correct_len: int, logits: tuple[float, ...], verify_len: int | None = None) -> RoundRecord:
    return RoundRecord(
        position=7,
        verify_len=len(logits) + 1 if verify_len is None else verify_len,
        num_drafts=len(logits),
        correct_len=correct_len,
        num_output=correct_len + 1,
        confidence_logits=logits,
    )


HALF, SURE = 0.0, 50.0  # logits of confidence 0.5 and 1


def test_figures_of_a_few_rounds_by_hand() -> None:
    report = confidence_report([record(2, (SURE, HALF)), record(1, (SURE, HALF)), record(0, (HALF, HALF))])
    assert report is not None
    assert (report.num_rounds, report.num_censored) == (3, 0)
    first, second = report.positions
    assert (first.position, second.position) == (1, 2)
    assert first.survival == pytest.approx(2 / 3)
    assert first.confidence == pytest.approx(2.5 / 3)
    assert first.auc == 1
    assert first.ece == pytest.approx(0.5 / 3)
    assert first.brier == pytest.approx(0.25 / 3)
    assert second.survival == pytest.approx(1 / 3)
    assert second.confidence == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    assert second.ece == pytest.approx(0.25 / 3)
    assert report.ece_max == first.ece
    full = [b for b in first.bins if b.count]
    assert [(b.count, b.confidence, b.survival) for b in full] == [(1, 0.5, 0), (2, 1, 1)]


def test_sweep_replays_cut_blocks() -> None:
    report = confidence_report([record(2, (SURE, HALF)), record(1, (SURE, HALF)), record(0, (HALF, HALF))])
    assert report is not None
    points = {point.threshold: point for point in report.thresholds}
    assert points[0.0].tokens_per_step == pytest.approx(2)
    assert points[0.0].drafts_per_step == pytest.approx(2)
    assert points[0.0].acceptance_rate == pytest.approx(3 / 6)
    assert points[0.5] == ThresholdPoint(0.5, 2.0, 2.0, 0.5)
    assert points[0.6].drafts_per_step == pytest.approx(2 / 3)
    assert points[0.6].acceptance_rate == pytest.approx(1)
    assert points[0.6].tokens_per_step == pytest.approx(1 + 2 / 3)


def test_temperatures_are_applied() -> None:
    rounds = [record(1, (2.0,)), record(0, (2.0,))]
    plain, scaled = confidence_report(rounds), confidence_report(rounds, (1e6,))
    assert plain is not None
    assert scaled is not None
    assert plain.positions[0].confidence == pytest.approx(0.8808, abs=1e-4)
    assert scaled.positions[0].confidence == pytest.approx(0.5, abs=1e-4)
    assert scaled.temperatures == (1e6,)


def test_censored_rounds_are_left_out_and_counted() -> None:
    report = confidence_report([record(1, (HALF, HALF)), record(1, (HALF, HALF), verify_len=2)])
    assert report is not None
    assert (report.num_rounds, report.num_censored) == (1, 1)


def test_nothing_to_judge() -> None:
    assert confidence_report([]) is None
    assert confidence_report([RoundRecord(5, 5, 4, 2, 3, ())]) is None
    assert confidence_report([record(0, (HALF, HALF), verify_len=1)]) is None


def test_mixed_widths_are_refused() -> None:
    with pytest.raises(DataError, match=r"\[1, 2\] drafts are mixed"):
        confidence_report([record(1, (HALF,)), record(1, (HALF, HALF))])


def test_report_is_plain_json() -> None:
    report = confidence_report([record(1, (HALF, SURE)), record(2, (HALF, SURE))])
    assert report is not None
    assert json.loads(json.dumps(asdict(report)))["positions"][1]["position"] == 2
