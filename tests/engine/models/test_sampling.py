"""Sampling: the filters' sets, the penalties' arithmetic, frequencies, and independence from other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.engine.model_executor.sampling import sample, uniform
from forebay.engine.model_executor.step import SeqStep
from forebay.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.engine

SIZE = 3000


def logits_of(seed: int, size: int = SIZE) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, 2.5, size).astype(np.float32)


def seq(
    params: SamplingParams,
    position: int = 7,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    banned: tuple[int, ...] = (),
) -> SeqStep:
    tokens = np.zeros(1, dtype=np.int32)
    told = None if prompt is None else np.asarray(prompt, dtype=np.int32)
    return SeqStep(0, tokens, position - 1, [], True, params, banned, told, output)


def draw(row: np.ndarray[Any, Any], params: SamplingParams, position: int = 7, **told: Any) -> int:
    return sample(row[None].copy(), [seq(params, position, **told)])[0].token_id


def many(row: np.ndarray[Any, Any], params: SamplingParams, count: int = 400, **told: Any) -> set[int]:
    return {draw(row, replace(params, seed=s), **told) for s in range(count)}


def reference_set(row: np.ndarray[Any, Any], params: SamplingParams) -> set[int]:
    """The tokens that may be drawn, by a full sort in float64."""
    wide = row.astype(np.float64) / params.temperature
    weights = np.exp(wide - wide.max())
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    share = weights[order] / weights[order].sum()
    kept = order[(np.cumsum(share) - share) < params.top_p]
    return {int(t) for t in kept if weights[t] >= params.min_p}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([-1, 1, 2, 50, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.1, 0.9]),
)
def test_only_tokens_that_the_filters_keep_are_drawn(
    row_seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = logits_of(row_seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert many(row, params, 60) <= reference_set(row, params)


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_p=0.3), SamplingParams(min_p=0.3)])
def test_all_tokens_that_the_filters_keep_are_drawn_sometimes(params: SamplingParams) -> None:
    row = logits_of(1, 40)
    assert many(row, params, 3000) == reference_set(row, params)


def test_a_flat_distribution_needs_the_whole_vocabulary() -> None:
    """The first candidates hold far less than top_p: the search for the set has to widen, to the end if need be."""
    row = np.zeros(SIZE, dtype=np.float32)
    drawn = many(row, SamplingParams(top_p=0.9), 300)
    assert max(drawn) > 2000
    assert max(drawn) <= int(0.9 * SIZE)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999999), SamplingParams(temperature=0.5)])
def test_frequencies_are_the_probabilities(params: SamplingParams) -> None:
    row = logits_of(2, 8)
    wide = np.exp(row.astype(np.float64) / params.temperature)
    counts = np.bincount([draw(row, replace(params, seed=s)) for s in range(4000)], minlength=8)
    np.testing.assert_allclose(counts / 4000, wide / wide.sum(), atol=0.03)


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(5)), st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
def test_a_row_does_not_depend_on_the_others(order: list[int], subset: list[int]) -> None:
    rows = [logits_of(i) for i in range(5)]
    params = [
        SamplingParams(seed=11),
        SamplingParams(seed=12, top_p=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=13, top_k=5, logprobs=2),
        SamplingParams(seed=14, min_p=0.2, repetition_penalty=1.3),
    ]
    lone = [sample(rows[i][None].copy(), [seq(params[i], prompt=[1, 2])])[0] for i in range(5)]
    chosen = [i for i in order if i in subset]
    together = sample(np.stack([rows[i] for i in chosen]), [seq(params[i], prompt=[1, 2]) for i in chosen])
    assert together == [lone[i] for i in chosen]


def test_the_random_number_is_of_seed_and_position_alone() -> None:
    numbers = [uniform(s, p) for s in range(40) for p in range(40)]
    assert len(set(numbers)) == 1600
    assert 0.45 < float(np.mean(numbers)) < 0.55
    assert uniform(2**64 - 1, 2**31) == uniform(2**64 - 1, 2**31)
    assert all(0.0 <= n < 1.0 for n in numbers)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    row = np.zeros(100, dtype=np.float32)
    row[[40, 60]] = 3.0
    assert draw(row, SamplingParams(temperature=0.0)) == 40
    assert draw(row, SamplingParams(top_k=1, seed=5)) == 40
    assert draw(row, SamplingParams(temperature=0.0, logprobs=1)) == 40


def test_penalties_are_openais_and_ctrls() -> None:
    row = np.zeros(10, dtype=np.float32)
    row[[1, 2, 3]] = [4.0, 3.9, -1.0]
    greedy = SamplingParams(temperature=0.0)
    assert draw(row, replace(greedy, repetition_penalty=1.1), prompt=[1], output=[]) == 2
    assert draw(row, replace(greedy, presence_penalty=0.2), prompt=[1], output=[1]) == 2
    assert draw(row, replace(greedy, presence_penalty=0.2), prompt=[1], output=[]) == 1, "prompts are not penalised"
    assert draw(row, replace(greedy, frequency_penalty=0.04), prompt=[], output=[1, 1]) == 1
    assert draw(row, replace(greedy, frequency_penalty=0.04), prompt=[], output=[1, 1, 1]) == 2
    only_negative = np.full(3, -2.0, dtype=np.float32)
    only_negative[0] = -1.0
    assert draw(only_negative, replace(greedy, repetition_penalty=3.0), prompt=[0], output=[]) == 1


def test_banned_tokens_are_never_drawn() -> None:
    row = logits_of(3)
    best = int(row.argmax())
    assert draw(row, SamplingParams(temperature=0.0), banned=(best,)) == int(np.argsort(-row)[1])
    assert best not in many(row, SamplingParams(top_k=3), 100, banned=(best,))


def test_logprobs_are_the_models_own_before_any_filter() -> None:
    row = logits_of(4)
    params = SamplingParams(temperature=0.5, top_p=0.5, logprobs=3)
    got = sample(row[None].copy(), [seq(params, banned=(int(row.argmax()),))])[0]
    wide = row.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum())
    best = np.argsort(-row)[:3]
    assert [token for token, _ in got.top_logprobs] == best.tolist()
    np.testing.assert_allclose([value for _, value in got.top_logprobs], expected[best], rtol=1e-6)
    assert got.logprob == pytest.approx(expected[got.token_id], rel=1e-6)
