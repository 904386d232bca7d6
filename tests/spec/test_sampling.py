"""From logits to laws and tokens, against the slow reference and against transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark.spec.sampling import argmax, categorical, probabilities

from .reference import GREEDY, Params, draw, law_of, make_rows

PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.4, 1.0]),
)


def one_law(logits: torch.Tensor, params: Params) -> torch.Tensor:
    return probabilities(logits.view(1, 1, -1), make_rows([params], [0]))[0, 0]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(PARAMS, min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_laws_equal_the_reference(params: list[Params], num_rows: int, vocab: int, seed: int, ties: bool) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(params), num_rows, vocab))).float()
    if ties:
        logits = logits.round()
    laws = probabilities(logits, make_rows(params, [0] * len(params)))
    for b, n in np.ndindex(len(params), num_rows):
        expected = law_of(logits[b, n].numpy(), params[b])
        np.testing.assert_allclose(laws[b, n].numpy(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("vocab", [200, 5000])
@pytest.mark.parametrize(
    "params",
    [Params(top_p=0.5), Params(top_p=0.98), Params(top_p=0.9999999), Params(top_k=300), Params(3.0, 3000, 0.9, 0.001)],
)
def test_a_wide_nucleus_equals_the_reference(vocab: int, params: Params) -> None:
    """Laws flat enough that the first candidates, or the second, do not settle the filter; beside one that is not."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, vocab, generator=generator) * torch.tensor([0.3, 4.0]).view(1, 2, 1)
    laws = probabilities(logits, make_rows([params], [0]))[0]
    for row in range(2):
        np.testing.assert_allclose(laws[row].numpy(), law_of(logits[0, row].numpy(), params), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("vocab", [50, 5000])
def test_laws_equal_transformers(vocab: int) -> None:
    """Same order, same filters; transformers breaks ties, so there are none here."""
    params = Params(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01)
    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(params.temperature),
            MinPLogitsWarper(params.min_p),
            TopKLogitsWarper(params.top_k),
            TopPLogitsWarper(params.top_p),
        ]
    )
    logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(1)) * 2
    expected = warpers(torch.zeros(20, 1, dtype=torch.long), logits).softmax(-1)
    torch.testing.assert_close(probabilities(logits[None], make_rows([params], [0]))[0], expected)


def test_a_request_has_the_same_law_in_any_batch() -> None:
    params = [Params(), GREEDY, Params(top_k=5), Params(0.7, 0, 0.9), Params(min_p=0.1), Params(1.3, 40, 0.5, 0.01)]
    logits = torch.randn(len(params), 4, 3000, generator=torch.Generator().manual_seed(2)) * 2
    together = probabilities(logits, make_rows(params, [0] * len(params)))
    for b, kind in enumerate(params):
        assert torch.equal(together[b], probabilities(logits[b : b + 1], make_rows([kind], [0]))[0])


@pytest.mark.parametrize("params", [Params(1e-4), Params(1e-30), Params(top_p=1e-6), Params(top_k=1), GREEDY])
def test_the_ends_of_the_ranges_are_the_argmax(params: Params) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 5
    law = one_law(logits, params)
    assert law.sum() == 1
    assert law[logits.argmax()] == 1


def test_banned_tokens_have_no_probability() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf])
    for params in (Params(), Params(top_k=3), Params(top_p=0.99), Params(min_p=0.1), Params(1e-4), GREEDY):
        law = one_law(logits, params)
        assert law[[1, 3]].tolist() == [0, 0]
        assert law.sum() == pytest.approx(1)


@pytest.mark.parametrize("params", [Params(), Params(1e-4), Params(0.8, 2, 0.9, 0.1), GREEDY])
@pytest.mark.parametrize("broken", [[-torch.inf] * 4, [torch.nan] * 4, [0.0, torch.nan, 1.0, 2.0]])
def test_a_broken_row_is_nan_and_alone(params: Params, broken: list[float]) -> None:
    logits = torch.tensor([[broken, [0.0, 1.0, 2.0, 3.0]]])
    law = probabilities(logits, make_rows([params], [0]))[0]
    assert law[0].isnan().all()
    assert law[1].sum() == pytest.approx(1)


def test_half_precision_logits_are_read_as_they_are() -> None:
    logits = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(4)).bfloat16()
    rows = make_rows([Params(0.7, 20, 0.9), GREEDY], [0, 0])
    laws = probabilities(logits, rows)
    assert laws.dtype == torch.float32
    assert torch.equal(laws, probabilities(logits.float(), rows))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-38, 1e-7, 0.1, 0.5]), min_size=1, max_size=12), st.floats(0, 1 - 2**-53))
def test_draws_equal_the_reference_and_are_possible(law: list[float], u: float) -> None:
    probs = torch.tensor([law])
    token = int(categorical(probs, torch.tensor([u], dtype=torch.float64)))
    if not any(law):
        assert token == -1
    else:
        assert law[token] > 0
        assert token == draw(probs[0].double().numpy(), u)


def test_a_draw_of_a_broken_law_is_no_token() -> None:
    probs = torch.tensor([[torch.nan, torch.nan], [0.0, 0.0], [0.0, 1.0]])
    assert categorical(probs, torch.full((3,), 0.5, dtype=torch.float64)).tolist() == [-1, -1, 1]


def test_draws_follow_the_law_over_a_real_vocabulary() -> None:
    law = torch.randn(49_152, generator=torch.Generator().manual_seed(5)).mul(4).softmax(0)
    draws = 4000
    u = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = categorical(law.expand(8, -1), u.view(8, -1)[:, 0])
    assert (law[tokens] > 0).all()
    cumulative = law.double().cumsum(0)
    picks = torch.stack([categorical(law, x) for x in u[::40]])
    assert torch.equal(picks, torch.searchsorted(cumulative, u[::40] * cumulative[-1], right=True))


@pytest.mark.parametrize("shape", [(49_152,), (3, 49_152), (2, 3, 8192), (5, 7001), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_equals(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    assert torch.equal(argmax(logits), torch.as_tensor(logits.float().numpy().argmax(-1)))
    flat = torch.zeros(shape, dtype=dtype)
    assert (argmax(flat) == 0).all()
    flat[..., [-1, -2]] = 1
    assert (argmax(flat) == shape[-1] - 2).all()
