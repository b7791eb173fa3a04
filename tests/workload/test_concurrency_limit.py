"""The concurrency limit against simulated servers, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from forebay.workload.concurrency_limit import ConcurrencyLimit

_TOKENS = 100


def _simulate(
    limit: ConcurrencyLimit,
    step_s: Callable[[int], float],
    *,
    seconds: float,
    noise: float = 0.05,
    queue: int | None = None,
    seed: int = 1,
) -> tuple[float, int]:
    """A server whose token step takes ``step_s(n)`` with n requests in flight; returns tokens a second at the end,
    and refusals.
    """
    chosen = random.Random(seed)
    now, refused, done_tokens, counted_from = 0.0, 0, 0, seconds * 0.75
    running: list[tuple[float, float, int]] = []
    while now < seconds:
        paused = False
        while len(running) < limit.value and not paused:
            if queue is not None and len(running) >= queue:
                refused += 1
                limit.throttled(now, now)
                paused = True
                continue
            length = _TOKENS * chosen.uniform(0.5, 1.5)
            took = length * step_s(max(len(running), 1)) * chosen.uniform(1 - noise, 1 + noise)
            heapq.heappush(running, (now + took, now, int(length)))
        now, started, tokens = heapq.heappop(running)
        limit.finished(started, now, tokens)
        done_tokens += tokens if now >= counted_from else 0
    return done_tokens / (seconds - counted_from), refused


@pytest.mark.parametrize("best", [1, 12, 40, 200])
def test_it_finds_the_throughput_of_the_best_fixed_limit_within_a_minute(best: int) -> None:
    """A step costs the same until ``best`` requests, then grows with them: throughput rises, then is flat."""

    def step_s(n: int) -> float:
        return 0.01 * max(1.0, n / best)

    found, _ = _simulate(ConcurrencyLimit(), step_s, seconds=60)
    sweep = [_simulate(ConcurrencyLimit(start=n, fixed=True), step_s, seconds=60)[0] for n in (1, 4, 16, 64, 256, 512)]
    assert found >= 0.9 * max(sweep)


def test_it_does_not_run_far_past_a_server_that_gets_worse() -> None:
    def step_s(n: int) -> float:
        return 0.01 * max(1.0, n / 32) * (1 + (n / 100) ** 2)

    limit = ConcurrencyLimit()
    _simulate(limit, step_s, seconds=60)
    assert 16 <= limit.value <= 128


def test_it_stays_under_a_bounded_queue_after_few_refusals() -> None:
    limit = ConcurrencyLimit()
    _, refused = _simulate(limit, lambda n: 0.01, seconds=60, queue=50)
    assert 20 <= limit.value <= 55
    assert refused < 40


def test_one_burst_of_refusals_counts_once() -> None:
    limit = ConcurrencyLimit(start=100)
    for sent in (1.0, 1.1, 1.2):
        limit.throttled(sent, 2.0)
    assert limit.value == 75


def test_a_fixed_limit_moves_for_refusals_only_and_returns() -> None:
    limit = ConcurrencyLimit(start=10, fixed=True)
    limit.failed(0.0, 1.0)
    assert limit.value == 10
    limit.throttled(1.0, 2.0)
    assert limit.value == 7
    for second in range(3, 60):
        limit.finished(second - 1.0, float(second), 1)
    assert limit.value == 10


def test_the_server_s_fault_halves_it_once() -> None:
    limit = ConcurrencyLimit(start=64)
    for _ in range(5):
        limit.failed(0.0, 1.0)
    assert limit.value == 32
    assert not limit.settled


def test_a_server_that_counts_its_tokens_is_measured_before_its_answers_end() -> None:
    """Throughput rises to 64 in flight and is flat from there; not one answer ends in the first minute."""
    limit = ConcurrencyLimit()
    now, generated, chosen = 0.0, 0.0, random.Random(3)
    seen = []
    while now < 60:
        now += 0.5
        generated += 10.0 * min(limit.value, 64) * chosen.uniform(0.99, 1.01)
        limit.counted(generated, now, full=True)
        seen.append(limit.value)
    assert limit.settled
    assert 64 <= seen[-1] <= 160
    assert 64 in seen[: 2 * 30], "found within half a minute"


def test_counts_of_a_limit_that_is_not_filled_say_nothing() -> None:
    limit = ConcurrencyLimit()
    for second in range(60):
        limit.counted(100.0 * second, float(second), full=False)
    assert (limit.value, limit.samples) == (16, [])
