"""The simulator: laws of acceptance, loads, the published curve, and the command from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark.drafters.layouts.calibration import Calibration
from dspark.errors import CheckpointError, ConfigError, DataError
from dspark.evaluation.acceptance import GivenAcceptance, RecordedAcceptance, constant_chance
from dspark.evaluation.config import SimulateOptions
from dspark.evaluation.load_model import Load
from dspark.evaluation.published import Published
from dspark.evaluation.simulate import (
    POLICIES,
    Point,
    Scene,
    Simulation,
    by_policy,
    open_scene,
    shape_error,
    simulate_point,
)
from dspark.evaluation.simulation_report import points_table, run
from dspark.spec.cost import AdditiveProfile, Curve, RoundCosts

CHANCES = [[0.8] * 4, [0.4] * 4]
# Rows cost little up to 8, then much.
COSTS = RoundCosts(AdditiveProfile(1.0, (1,), (0.0,), (1, 8, 64), (0.0, 0.1, 4.7)), Curve((1,), (0.2,)))


def scene(chances: list[list[float]] = CHANCES, costs: RoundCosts = COSTS) -> Scene:
    return Scene(costs, GivenAcceptance(chances, 1.0), None)


def point(policy: str, size: int, made: Scene | None = None, **options: object) -> Point:
    settings = SimulateOptions.from_dict({"length": 24.0, "requests": 40} | options, "test")
    return simulate_point(policy, made or scene(), settings, None, size)  # type: ignore[arg-type]


def test_given_chances_are_kept_and_confidence_is_the_chance() -> None:
    law = GivenAcceptance(CHANCES, 1.0)
    sorts = np.zeros(40_000, dtype=np.int64)
    logits, correct = law.rounds(sorts, np.random.default_rng(0))
    assert logits is not None
    survived = correct[:, None] > np.arange(4)
    np.testing.assert_allclose(survived.mean(0), 0.8 ** np.arange(1, 5), atol=0.01)
    confidence = 1 / (1 + np.exp(-logits[:, 0]))
    sure = confidence > 0.9
    assert sure.any()
    assert abs(survived[sure, 0].mean() - confidence[sure].mean()) < 0.01


def test_accepted_length_weighs_requests_of_one_length() -> None:
    law = GivenAcceptance(CHANCES, 1.0)
    lengths = [sum(p**k for k in range(5)) for p in (0.8, 0.4)]
    assert law.accepted_length() == pytest.approx(2 / sum(1 / length for length in lengths))


def test_constant_chance_gives_the_accepted_length() -> None:
    chance = constant_chance(3.3, 7)
    assert sum(chance**k for k in range(8)) == pytest.approx(3.3)
    with pytest.raises(ConfigError, match=r"accepted_length: 9 is not between 1 and 8"):
        constant_chance(9, 7)


def test_loads_bring_the_same_requests_whoever_serves_them() -> None:
    def served(speed: float) -> list[tuple[int, int]]:
        load, clock, seen = Load(GivenAcceptance(CHANCES, 1.0), 30.0, 2.0, 4, seed=3), 0.0, []
        while len(seen) < 50:
            active = []  # all are done at once
            clock = load.admit(active, clock) + speed
            assert len(active) <= 4
            assert all(request.arrived <= clock for request in active)
            seen += [(request.sort, request.left) for request in active]
        return seen[:50]

    assert served(0.01) == served(3.0)
    sorts, lengths = zip(*served(1.0), strict=True)
    assert abs(sum(sorts) - 25) <= 1  # an even mix
    assert abs(np.mean(lengths) - 30) < 5


def test_arrivals_come_at_their_rate_and_wait_for_a_place() -> None:
    load = Load(GivenAcceptance(CHANCES, 1.0), 30.0, 5.0, 2, seed=0)
    clock, count = 0.0, 0
    for _ in range(400):
        active = []
        clock = load.admit(active, clock) + 0.2
        count += len(active)
    assert count / clock == pytest.approx(5.0, rel=0.15)
    assert max(load.waits) > 0 <= min(load.waits)


def test_plain_and_fixed_follow_from_costs_and_acceptance() -> None:
    plain, fixed = point("plain", 4), point("fixed", 4)
    assert plain.tokens_per_second == pytest.approx(4 / COSTS.seconds(4, np.array([0]), np.array([4]))[0])
    assert (plain.verify_budget, plain.drafted_share, plain.accepted_length) == (0, 0, 1)
    assert fixed.verify_budget == 4
    assert fixed.accepted_length == pytest.approx(scene().acceptance.accepted_length(), rel=0.1)
    seconds = COSTS.seconds(4, np.array([4]), np.array([20]))[0]
    assert fixed.tokens_per_second == pytest.approx(4 * fixed.accepted_length / seconds)
    assert fixed.user_tokens_per_second == pytest.approx(fixed.tokens_per_second / 4)


@pytest.mark.parametrize("policy", ["early_stop", "lagged"])
def test_the_planner_trims_as_rows_become_dear(policy: str) -> None:
    low, high = point(policy, 1), point(policy, 8)
    assert low.verify_budget > 2
    assert high.verify_budget < 1
    best = max(point(p, 8).tokens_per_second for p in ("plain", "fixed"))
    assert high.tokens_per_second > 0.99 * best  # drafting now and then, to see whether it pays, takes half a percent


def test_the_planner_stops_drafting_where_drafts_are_worthless() -> None:
    made = scene([[0.02] * 4])
    adaptive, plain = point("lagged", 2, made), point("plain", 2, made)
    assert adaptive.drafted_share < 0.1
    assert adaptive.tokens_per_second > 0.97 * plain.tokens_per_second > point("fixed", 2, made).tokens_per_second


def test_requests_end_after_their_tokens() -> None:
    made = scene()
    simulation = Simulation("fixed", made, Load(made.acceptance, 20.0, None, 3, seed=0), seed=0)
    tokens = 0
    for _ in range(200):
        tokens += simulation.round().tokens
        assert len(simulation.active) <= 3
        assert all(request.left > 0 for request in simulation.active)
    assert tokens / simulation.num_served == pytest.approx(20.5, rel=0.15)


def recorded(path: Path, widths: tuple[int, ...] = (4, 4), logits: bool = True) -> Path:
    """Two requests: one whose drafts are all accepted, one whose are not; and a round that was cut short."""
    rows = []
    for number, width in enumerate(widths):
        correct = 0 if number else width
        rounds = [[i, width + 1, width, correct, 1, [2.0 - 4 * number] * width * logits] for i in range(3)]
        rows.append({"rounds": [*rounds, [9, 1, width, 0, 1, [0.0] * width * logits]]})
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"rounds": []}]))
    return path


def test_recorded_rounds_are_drawn_again(tmp_path: Path) -> None:
    law = RecordedAcceptance.read(recorded(tmp_path / "rows.jsonl"))
    assert (law.num_drafts, law.has_confidence) == (4, True)
    assert law.accepted_length() == pytest.approx(2 / (1 / 5 + 1 / 1))
    logits, correct = law.rounds(np.array([law.sort_at(0.2), law.sort_at(0.9)]), np.random.default_rng(0))
    assert logits is not None
    assert (correct.tolist(), logits[:, 0].tolist()) == ([4, 0], [2.0, -2.0])


def test_rounds_without_confidences_are_planned_by_what_was_accepted(tmp_path: Path) -> None:
    law = RecordedAcceptance.read(recorded(tmp_path / "rows.jsonl", logits=False))
    assert not law.has_confidence
    found = point("early_stop", 2, Scene(COSTS, law, None))
    assert found.tokens_per_second > point("fixed", 2, Scene(COSTS, law, None)).tokens_per_second


def test_a_calibration_goes_with_recorded_rounds(tmp_path: Path) -> None:
    rows = recorded(tmp_path / "rows.jsonl")
    calibration = Calibration(
        drafter_digest="d",
        target="t",
        target_digest="t",
        temperatures=(1.0, 2.0, 4.0, 0.5),
        sampling_temperatures=(1.0,),
        prompts=("p",),
        num_rounds=6,
        num_held_out_rounds=0,
        ece_before=(0.0,) * 4,
        ece_after=(0.0,) * 4,
    )
    calibration.write(tmp_path)
    given = {"acceptance": rows, "calibration": tmp_path / "calibration.json"}
    assert open_scene(SimulateOptions.from_dict(given, "test")).temperatures == (1.0, 2.0, 4.0, 0.5)
    with pytest.raises(CheckpointError, match="no such calibration: make it with dspark calibrate"):
        open_scene(SimulateOptions.from_dict(given | {"calibration": tmp_path / "none.json"}, "test"))


def test_bad_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match=r"rows\.jsonl: has rounds of several drafters"):
        RecordedAcceptance.read(recorded(path, (4, 3)))
    path.write_text('{"rounds": []}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl: has no full-width rounds: name"):
        RecordedAcceptance.read(path)
    path.write_text('{"rounds": [[1, 2]]}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl: line 1: `rounds` is not a list of round records"):
        RecordedAcceptance.read(path)


def test_published_costs_give_the_published_plain_and_fixed_columns() -> None:
    published = Published.load()
    costs, tau = published.costs(), published.acceptance().accepted_length()
    for size, plain, fixed in zip(published.concurrency, published.plain, published.fixed, strict=True):
        step, whole = costs.seconds(size, np.array([0, size]), np.array([size, 8 * size]))
        assert size / step == pytest.approx(plain)
        assert size * tau / whole == pytest.approx(fixed, rel=0.04)


def test_published_acceptance_behaves_as_the_published_threshold_sweep() -> None:
    """Blocks cut before the first confidence below .8: some 92 to 96 of 100 verified are accepted (paper figure 5)."""
    law = Published.load().acceptance()
    logits, correct = law.rounds(np.arange(30_000) % 3, np.random.default_rng(0))
    assert logits is not None
    run = (logits >= np.log(4)).cumprod(1).sum(1)
    assert 0.91 < np.minimum(run, correct).sum() / run.sum() < 0.96


def test_shape_error_is_the_worst_ratio_or_shortfall() -> None:
    published = Published.load()
    exact = list(published.adaptive)
    low = [1.0] * len(exact)
    assert published.shape_error(low, low, exact) == 0
    assert published.shape_error(low, low, [exact[0] * 2, *exact[1:]]) == pytest.approx(0.5)
    assert published.shape_error([*low[:-1], exact[-1] * 1.25], low, exact) == pytest.approx(0.2)


def test_the_published_curve_at_two_concurrencies() -> None:
    """A short run of what `simulated_shape_error` runs at five."""
    published = Published.load()
    made = Scene(published.costs(), published.acceptance(), None)
    short = {"length": 32.0, "requests": 30}
    rates = {p: [point(p, size, made, **short).tokens_per_second for size in (16, 64)] for p in POLICIES}
    for policy in ("early_stop", "lagged"):
        assert rates[policy][1] > max(rates["plain"][1], rates["fixed"][1])
        assert rates[policy][1] / rates[policy][0] == pytest.approx(7144 / 2774, rel=0.15)


def test_the_command_writes_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS.to_dict()))
    changes = {"costs": str(costs), "chances": [0.8] * 4, "concurrency": [1, 4], "arrivals": [0.2], "max_batch": 4}
    options = SimulateOptions.from_dict(
        changes | {"length": 12.0, "requests": 10, "out": tmp_path / "out", "report": {"json_output": True}}, "test"
    )
    run(options)
    told = json.loads(capsys.readouterr().out)
    assert len(told["points"]) == 3 * len(POLICIES)
    assert told["points"] == json.loads((tmp_path / "out" / "simulation.json").read_text())["points"]
    assert "shape_error" not in told  # other costs than the published ones
    page = (tmp_path / "out" / "simulation.html").read_text()
    assert page.count("<svg") == 2
    for name in ("speed.png", "budget.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    table = points_table([Point(**point) for point in told["points"]])
    assert [row[0].text for row in table.rows[:: len(POLICIES)]] == ["1", "4", "0.2/s"]


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="chances: drafts are accepted as recorded"):
        SimulateOptions.from_dict({"acceptance": "rows.jsonl", "chances": [0.5]}, "test")
    with pytest.raises(ConfigError, match="calibration: belongs to recorded rounds"):
        SimulateOptions.from_dict({"calibration": "calibration.json"}, "test")


def test_points_of_published_loads_have_a_shape_error() -> None:
    published = Published.load()
    fields = {"arrivals": None, "verify_budget": 1.0, "drafted_share": 1.0, "accepted_length": 2.0}
    columns = {"plain": published.plain, "fixed": published.fixed, "lagged": published.adaptive}
    points = [
        Point(policy, concurrency=1.0, tokens_per_second=rate, user_tokens_per_second=rate, wait_seconds=0.0, **fields)
        for policy, rates in columns.items()
        for rate in rates
    ]
    # The published planner itself stays behind full verification at 4 requests.
    assert shape_error(points, published) == pytest.approx(1 - 902 / 970)
    assert [p.tokens_per_second for p in by_policy(points, "plain")] == list(published.plain)
