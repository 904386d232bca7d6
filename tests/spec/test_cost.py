"""SPS profiles: lookup, interpolation, monotony, SGLang's JSON; and what rounds teach."""

import numpy as np
import pytest

from dspark.errors import ConfigError
from dspark.spec.cost import AdditiveProfile, Curve, DiagonalProfile, RoundCosts, profile_dict, read_profile
from dspark.spec.online import OnlineCosts
from dspark.spec.planner import Costs

ADDITIVE = AdditiveProfile(0.01, (1, 4, 16), (0.0, 0.003, 0.002), (1, 8, 64), (0.0, 0.007, 0.035))


def seconds(costs: Costs, num_requests: int, rows: list[int], num_drafting: int = 1) -> list[float]:
    return costs.seconds(num_requests, np.full((len(rows),), num_drafting), np.array(rows)).tolist()


def test_diagonal_is_a_floor_lookup_clamped_at_both_ends() -> None:
    profile = DiagonalProfile((2, 4, 8, 16), (50.0, 40.0, 45.0, 20.0), 12)
    found = profile.seconds(3, np.array([1, 2, 3, 4, 7, 8, 11, 12, 100]))
    # The third sample is above the second, which noise alone explains.
    assert (1 / found).tolist() == pytest.approx([50, 50, 50, 40, 40, 40, 40, 40, 40])


def test_additive_interpolates_rises_and_goes_on() -> None:
    assert ADDITIVE.seconds(1, np.array([1, 8, 36, 64, 120])).tolist() == pytest.approx(
        [0.01, 0.017, 0.031, 0.045, 0.073]
    )
    assert ADDITIVE.seconds(10, np.array([1])).tolist() == pytest.approx([0.013]), "alpha is made monotone"
    one = AdditiveProfile(0.01, (4,), (0.0,), (8,), (0.002,))
    assert one.seconds(9, np.array([1, 99])).tolist() == pytest.approx([0.012, 0.012])


def test_a_round_has_its_drafting_time_and_a_plain_round_its_own() -> None:
    costs = RoundCosts(ADDITIVE, Curve((1, 3), (0.002, 0.004)), Curve((1, 2), (0.009, 0.0095)))
    assert seconds(costs, 4, [8], num_drafting=2) == pytest.approx([0.01 + 0.003 + 0.007 + 0.003])
    assert seconds(costs, 2, [2], num_drafting=0) == pytest.approx([0.0095])
    assert seconds(RoundCosts(ADDITIVE), 4, [4], num_drafting=0) == pytest.approx([0.01 + 0.003 + 0.003])


def test_json_is_sglangs_and_comes_back() -> None:
    diagonal = DiagonalProfile((1, 8), (50.0, 40.0), 64)
    assert set(profile_dict(diagonal)) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    assert set(profile_dict(ADDITIVE)) == {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}
    for profile in (diagonal, ADDITIVE):
        assert read_profile(profile_dict(profile)) == profile
        assert RoundCosts.from_dict(profile_dict(profile), "table") == RoundCosts(profile)
    costs = RoundCosts(ADDITIVE, Curve((1, 3), (0.002, 0.004)), Curve((1,), (0.009,)), {"threads": 2})
    assert RoundCosts.from_dict(costs.to_dict(), "costs") == costs


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"theta_seconds": [0.0, 0.1]}, "theta_seconds and m_probes"),
        ({"m_probes": [8, 1, 64]}, "m_probes must rise"),
        ({"theta_seconds": [0.0, float("nan"), 1.0]}, "theta_seconds"),
        ({"bias_seconds": "1"}, "bias_seconds"),
        ({"bias_seconds": -1.0}, "above 0"),
        ({"extra": 1}, "expected the fields"),
    ],
)
def test_a_bad_table_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RoundCosts.from_dict(profile_dict(ADDITIVE) | change, "table.json")
    with pytest.raises(ConfigError, match="table.json"):
        RoundCosts.from_dict({"verify": profile_dict(ADDITIVE) | change}, "table.json")


def test_a_flat_table_says_so() -> None:
    assert DiagonalProfile((1, 8), (40.0, 40.0), 64).is_flat
    assert not DiagonalProfile((1, 8), (40.0, 39.0), 64).is_flat
    assert AdditiveProfile(0.01, (1,), (0.0,), (1, 64), (0.003, 0.003)).is_flat
    assert not ADDITIVE.is_flat


def test_rounds_move_the_costs_at_a_bounded_rate() -> None:
    costs = OnlineCosts(RoundCosts(ADDITIVE, None, Curve((1, 16), (0.01, 0.012))))
    before = seconds(costs, 4, [16])[0]
    assert costs.observe(4, 4, 16, 100 * before) == pytest.approx(before)
    assert seconds(costs, 4, [16])[0] < 1.2 * before, "a pause is no measurement"
    for _ in range(100):
        costs.observe(4, 4, 16, 1.5 * before)
    assert seconds(costs, 4, [16])[0] == pytest.approx(1.5 * before, rel=1e-3)
    assert 0.01 * 1.2 < seconds(costs, 4, [4], num_drafting=0)[0] < 0.01 * 1.5, "what is not run drifts along"
    for _ in range(200):
        costs.observe(4, 0, 4, 0.0104)
        costs.observe(4, 4, 16, 1.5 * before)
    assert seconds(costs, 4, [16])[0] == pytest.approx(1.5 * before, rel=0.1)
    assert seconds(costs, 4, [4], num_drafting=0)[0] == pytest.approx(0.0104, rel=0.1)
    curve = seconds(costs, 4, list(range(1, 100)))
    assert curve == sorted(curve), "more rows never take less"


def test_what_is_learnt_of_plain_rounds_holds_for_speculative_ones_of_as_many_requests() -> None:
    """Contexts shorter than the measured ones: else drafts that were never tried would look dearer than they are."""
    costs = OnlineCosts(RoundCosts(ADDITIVE, None, Curve((1, 16), (0.01, 0.012))))
    before = {size: seconds(costs, size, [4 * size])[0] for size in (1, 8)}
    plain = {size: seconds(costs, size, [size], num_drafting=0)[0] for size in (1, 8)}
    for _ in range(200):
        costs.observe(1, 0, 1, plain[1])
        costs.observe(8, 0, 8, 0.8 * plain[8])
    assert seconds(costs, 1, [4])[0] == pytest.approx(before[1], rel=0.06)
    assert seconds(costs, 8, [32])[0] < 0.92 * before[8]
