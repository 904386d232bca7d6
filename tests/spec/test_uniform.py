"""The counter-based noise: SplitMix64 as published, uniform, and independent of its neighbours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from dspark.spec.sampling import Role, fold_seed, round_seed, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def splitmix64(seed: int, n: int) -> int:
    """Output number n, from 0, of the generator as its authors give it."""
    return mix((seed + (n + 1) * GOLDEN) & MASK)


def test_the_plain_generator_gives_the_published_numbers() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, n) for n in range(4)] == published


@settings(derandomize=True, deadline=None)
@given(st.integers(), st.integers(0, 1 << 40), st.sampled_from(Role))
def test_noise_is_the_numbered_output_of_the_generator(seed: int, position: int, role: Role) -> None:
    start = splitmix64(seed & MASK, 0)
    expected = (splitmix64(start, 4 * position + role) >> 11) * 2.0**-53
    seeds, positions = torch.tensor([fold_seed(seed)]), torch.tensor([position])
    assert uniform(seeds, positions, role).item() == expected
    assert 0 <= expected < 1


@given(st.integers())
def test_any_integer_is_a_seed(seed: int) -> None:
    folded = fold_seed(seed)
    assert -(1 << 63) <= folded < 1 << 63
    assert (folded - seed) % (1 << 64) == 0


def grid() -> np.ndarray:
    """Noise of 500 neighbouring seeds, 100 positions and the three roles, [seeds, positions, roles]."""
    seeds, positions = torch.arange(-250, 250)[:, None], torch.arange(100)
    return np.stack([uniform(seeds, positions, role).numpy() for role in Role], -1)


PAIRINGS = {
    "draft and accept": lambda u: (u[..., 0], u[..., 1]),
    "draft and bonus": lambda u: (u[..., 0], u[..., 2]),
    "accept and bonus": lambda u: (u[..., 1], u[..., 2]),
    "neighbouring positions": lambda u: (u[:, :-1], u[:, 1:]),
    "neighbouring seeds": lambda u: (u[:-1], u[1:]),
    "opposite seeds": lambda u: (u[1:250], u[:250:-1]),
    "bonus and the next draft": lambda u: (u[:, :-1, 2], u[:, 1:, 0]),
}


def test_noise_is_uniform() -> None:
    u = grid()
    for role in Role:
        assert kstest(u[..., role].ravel(), "uniform").pvalue > 1e-3
    assert kstest(u[7].ravel(), "uniform").pvalue > 1e-3  # one seed alone
    bits = (u.ravel() * 2.0**53).astype(np.int64)[:, None] >> np.arange(53) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 4.5 * 0.5 / np.sqrt(len(bits))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_noise_is_independent_of_its_neighbours(pairing: str) -> None:
    a, b = (x.ravel() for x in PAIRINGS[pairing](grid()))
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))
    cells = np.histogram2d(a, b, bins=16, range=[[0, 1], [0, 1]])[0]
    expected = len(a) / cells.size
    assert chi2.sf(((cells - expected) ** 2 / expected).sum(), cells.size - 1) > 1e-3


def test_noise_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([3, -9, 1 << 62]), torch.tensor([5, 0, 123456])
    together = uniform(seeds, positions, Role.BONUS)
    alone = [uniform(seeds[i], positions[i], Role.BONUS) for i in range(3)]
    assert together.tolist() == [u.item() for u in alone]


def test_every_round_draws_its_drafts_with_a_seed_of_its_own() -> None:
    seeds, anchors = torch.arange(-100, 100)[:, None], torch.arange(100)
    of_rounds = round_seed(*(grid.flatten() for grid in torch.broadcast_tensors(seeds, anchors)))
    assert len(of_rounds.unique()) == 200 * 100
    assert int(of_rounds[0]) & MASK == splitmix64(splitmix64(-100 & MASK, 0), 3), "a number that no role draws"
    drafted = uniform(of_rounds.view(200, 100), anchors + 1, Role.DRAFT)
    assert kstest(drafted.flatten().numpy(), "uniform").pvalue > 1e-3
    again = uniform(of_rounds.view(200, 100)[:, :-1], anchors[1:] + 1, Role.DRAFT)  # the position, one round earlier
    assert abs(np.corrcoef(drafted[:, 1:].flatten(), again.flatten())[0, 1]) < 0.03
