"""Statistics: intervals that hold what they promise, and comparisons that neither invent nor miss a difference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.workload.bench.stats import gap_percentiles, percentiles, ratio_of_rounds, throughput


def _tries(slower: float, *, rounds: int = 8, noise: float = 0.02, drift: float = 0.3) -> int:
    """In how many of ten tries B, slower by ``slower``, is told apart from A, on a machine that drifts."""
    generator = np.random.default_rng(5)
    told = 0
    for _ in range(10):
        machine = 1 + drift * generator.random(rounds)
        a = 100 * machine * generator.normal(1, noise, rounds)
        b = 100 * (1 - slower) * machine * generator.normal(1, noise, rounds)
        ratio = ratio_of_rounds(list(a), list(b))
        assert ratio is not None
        told += ratio.differs
    return told


def test_equal_servers_compare_as_equal_in_nine_of_ten_tries() -> None:
    assert _tries(0.0) <= 1


def test_five_percent_is_told_apart_in_nine_of_ten_tries() -> None:
    assert _tries(0.05) >= 9


def test_a_ratio_needs_two_rounds_and_ignores_rounds_that_measured_nothing() -> None:
    assert ratio_of_rounds([1.0], [2.0]) is None
    ratio = ratio_of_rounds([1.0, 1.0, 0.0], [2.0, 2.0, 5.0])
    assert ratio is not None
    assert (ratio.value, ratio.rounds) == (pytest.approx(2.0), 2)


def test_the_interval_of_a_median_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(60):
        found = percentiles(list(generator.exponential(1.0, 80)), (50,))[50]
        held += found.low <= np.log(2) <= found.high
    assert held >= 50


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50))
@settings(max_examples=40, deadline=None)
def test_percentiles_are_those_of_the_values(values: list[float]) -> None:
    found = percentiles(values, (50, 90))
    assert found[50].value == pytest.approx(np.percentile(values, 50))
    for estimate in found.values():
        assert min(values) <= estimate.low <= estimate.high <= max(values)


def test_gaps_of_one_request_are_not_independent() -> None:
    """Ten requests of 100 equal gaps each know as little as ten values, and the interval says so."""
    requests = [[float(n)] * 100 for n in range(10)]
    pooled = percentiles([gap for request in requests for gap in request], (50,))[50]
    clustered = gap_percentiles(requests, (50,))[50]
    assert clustered.high - clustered.low > 2 * (pooled.high - pooled.low)


def test_throughput_is_the_sum_over_the_time() -> None:
    found = throughput([0.5, 1.5, 2.5], [10, 10, 40], 3.0)
    assert found.value == pytest.approx(20.0)
    assert found.low <= found.value <= found.high
