"""The scheduler over a fake runner: the right tokens whatever the mixture, and every page back at the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import VOCAB, FakeGate, FakeRunner, expected_output, make_cache, make_sequence

from forebay.engine.config import SchedulerConfig
from forebay.engine.scheduler.budget import StepBudget
from forebay.engine.scheduler.queue import WaitingQueue
from forebay.engine.scheduler.scheduler import Scheduler

PAGE = 4


def make_scheduler(num_pages: int = 64, *, loads: bool = False, seed: int = 0, **limits: int) -> Scheduler:
    cache = make_cache(num_pages, PAGE, seed, loads=loads)
    config = SchedulerConfig(**{"max_running": 8, "chunk_size": 16, **limits})
    return Scheduler(cache, FakeRunner(num_pages, PAGE), config, page_size=PAGE)


def run_to_end(scheduler: Scheduler, outputs: dict[int, list[int]], *, steps: int = 5000) -> None:
    for _ in range(steps):
        if not scheduler.has_work:
            return
        scheduler._blocked_until = 0.0  # a test does not wait for the clock
        outcome = scheduler.step()
        scheduler._cache.check()
        for event in outcome.events if outcome else []:
            outputs.setdefault(event.seq_id, []).append(event.token)
    raise AssertionError("the scheduler makes no progress")


def free_pages(scheduler: Scheduler) -> int:
    return scheduler._cache.pools.device[0].num_free


def test_a_long_prompt_is_computed_in_chunks_and_decoding_goes_on_beside_it() -> None:
    scheduler = make_scheduler(chunk_size=16)
    outputs: dict[int, list[int]] = {}
    scheduler.submit(make_sequence(1, [1, 2, 3], 30))
    scheduler.step()
    scheduler.submit(make_sequence(2, list(range(40)), 2))
    run_to_end(scheduler, outputs)
    mixed = [step for step in scheduler._runner.steps if len(step) == 2]
    assert [step[1] for step in mixed[:3]] == [16, 16, 8]
    assert all(step[0] == 1 for step in mixed)


def test_a_sequence_that_runs_out_of_pages_is_preempted_and_still_right() -> None:
    scheduler = make_scheduler(num_pages=8)
    prompts = {1: [1, 2, 3, 4, 5], 2: [9, 8, 7, 6]}
    for seq_id, prompt in prompts.items():
        scheduler.submit(make_sequence(seq_id, prompt, 20))
    outputs: dict[int, list[int]] = {}
    run_to_end(scheduler, outputs)
    assert scheduler.num_preemptions > 0
    assert outputs == {seq_id: expected_output(prompt, 20, (), 0) for seq_id, prompt in prompts.items()}


def test_the_youngest_is_preempted_and_returns_before_those_that_came_later() -> None:
    scheduler = make_scheduler(num_pages=6, max_running=2)
    for seq_id in (1, 2, 3):
        scheduler.submit(make_sequence(seq_id, [seq_id, 5, 5, 5, 5], 12))
    order: list[int] = []
    while scheduler.has_work:
        scheduler._blocked_until = 0.0
        outcome = scheduler.step()
        order += [event.seq_id for event in outcome.events if event.finish] if outcome else []
    assert scheduler.num_preemptions > 0
    assert order == [1, 2, 3]


def test_cancelling_frees_pages_at_once() -> None:
    scheduler = make_scheduler(num_pages=32)
    for seq_id in (1, 2):
        scheduler.submit(make_sequence(seq_id, list(range(seq_id, seq_id + 30)), 50))
    scheduler.step()
    assert len(scheduler.running) == 2
    scheduler.abort([1, 2, 99])
    assert not scheduler.has_work
    scheduler._cache.check()
    scheduler._cache.flush()
    assert free_pages(scheduler) == 32


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = make_scheduler(num_pages=64, chunk_size=16)
    shared = list(range(40))
    outputs: dict[int, list[int]] = {}
    for seq_id in range(1, 5):
        scheduler.submit(make_sequence(seq_id, [*shared, seq_id], 3))
    run_to_end(scheduler, outputs)
    computed = sum(count for step in scheduler._runner.steps for count in step)
    once, own, decoding = 41, 4 * PAGE + 1, 2  # a prefix of up to four pages may be computed again
    assert computed <= once + 3 * own + 4 * decoding
    assert outputs == {i: expected_output([*shared, i], 3, (), 0) for i in range(1, 5)}


def test_a_sequence_that_waits_for_pages_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_pages=10)
    scheduler.submit(make_sequence(1, list(range(20)), 8))
    scheduler.step()
    scheduler.submit(make_sequence(2, list(range(20, 45)), 4))
    scheduler.submit(make_sequence(3, [1, 2], 2))
    scheduler.step()
    assert [s.seq_id for s in scheduler.running] == [1]
    assert [s.seq_id for s in scheduler.waiting] == [2, 3]


def test_a_loading_sequence_does_not_hold_up_others() -> None:
    scheduler = make_scheduler()
    warm = list(range(20))
    scheduler.submit(make_sequence(1, warm, 1))
    run_to_end(scheduler, {})
    slow = FakeGate(polls=5, fails=False)
    scheduler._cache._make_gate = lambda: slow
    scheduler.submit(make_sequence(2, [9, 9, 9], 20))
    scheduler.submit(make_sequence(3, warm, 4))
    seen: list[set[int]] = []
    for _ in range(8):
        outcome = scheduler.step()
        seen.append({event.seq_id for event in outcome.events} if outcome else set())
    assert seen[0] == {2}
    assert {2, 3} in seen


def test_finish_reasons_and_minimum_lengths() -> None:
    prompt = [3, 1, 4, 1, 5]
    free_run = expected_output(prompt, 10, (), 0)
    stop = free_run[4]
    early = free_run.index(stop)
    for min_tokens, ends in ((0, early + 1), (8, None)):
        scheduler = make_scheduler()
        scheduler.submit(make_sequence(1, prompt, 10, (stop,), min_tokens))
        events = []
        while scheduler.has_work:
            events += scheduler.step().events
        wanted = expected_output(prompt, 10, (stop,), min_tokens)
        assert [event.token for event in events] == wanted
        assert len(events) == (ends or len(wanted))
        assert events[-1].finish == ("stop" if wanted[-1] == stop else "length")
        assert len(events) >= min(min_tokens, 10)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_mixture_gives_the_tokens_of_lone_requests_and_all_pages_back(data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(10, 40), label="pages")
    scheduler = make_scheduler(
        num_pages,
        loads=True,
        seed=data.draw(st.integers(0, 1000)),
        chunk_size=data.draw(st.sampled_from([16, 24, 64])),
        max_running=data.draw(st.integers(1, 6)),
    )
    families = [np.random.default_rng(i).integers(0, VOCAB, 24).tolist() for i in range(3)]
    requests: dict[int, tuple[list[int], int, tuple[int, ...], int]] = {}
    aborted: set[int] = set()
    outputs: dict[int, list[int]] = {}
    next_id = 1
    for _ in range(data.draw(st.integers(1, 12), label="rounds")):
        for _ in range(data.draw(st.integers(0, 3))):
            family = data.draw(st.sampled_from(families))
            prompt = [
                *family[: data.draw(st.integers(1, 24))],
                *data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
            ]
            max_tokens = data.draw(st.integers(1, 10))
            stops = tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)))
            request = (prompt, max_tokens, stops, data.draw(st.integers(0, max_tokens)))
            requests[next_id] = request
            scheduler.submit(make_sequence(next_id, *request))
            next_id += 1
        if requests and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(requests)))
            scheduler.abort([victim])
            aborted.add(victim)
        scheduler._blocked_until = 0.0
        outcome = scheduler.step()
        scheduler._cache.check()
        for event in outcome.events if outcome else []:
            outputs.setdefault(event.seq_id, []).append(event.token)
    run_to_end(scheduler, outputs)
    for seq_id, request in requests.items():
        wanted = expected_output(*request)
        if seq_id in aborted:
            assert outputs.get(seq_id, []) == wanted[: len(outputs.get(seq_id, []))]
        else:
            assert outputs[seq_id] == wanted
    scheduler._cache.flush()
    assert free_pages(scheduler) == num_pages


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_the_queue_keeps_arrival_order(operations: list[tuple[bool, int]]) -> None:
    queue, model = WaitingQueue(), set()
    for is_add, seq_id in operations:
        if is_add and seq_id not in model:
            queue.add(make_sequence(seq_id, [1], 1))
            model.add(seq_id)
        elif not is_add:
            assert (queue.remove(seq_id) is not None) == (seq_id in model)
            model.discard(seq_id)
        assert [s.seq_id for s in queue] == sorted(model)
        assert len(queue) == len(model)


def test_the_budget_follows_measured_step_times() -> None:
    budget = StepBudget(chunk_size=512, target_s=0.1)
    assert budget.prefill_tokens(8) == 512
    for _ in range(50):
        budget.measured(8, 0, 0.02)
        budget.measured(0, 512, 0.512)
    assert budget.prefill_tokens(0) == 512
    assert budget.prefill_tokens(8) == 80
    for _ in range(50):
        budget.measured(8, 0, 0.2)
    assert budget.prefill_tokens(8) == 32


def test_a_step_beside_decoding_sequences_grows_with_what_is_pending() -> None:
    budget = StepBudget(chunk_size=2048, target_s=0.1)
    for _ in range(50):
        budget.measured(8, 0, 0.02)
        budget.measured(0, 512, 0.512)
    # A quarter of what is pending, the decoding's time off it: at least the target, at most a second.
    assert budget.prefill_tokens(8, 100) == 80
    assert budget.prefill_tokens(8, 2048) == pytest.approx(512 - 20, abs=16)
    assert budget.prefill_tokens(8, 100_000) == pytest.approx(1000 - 20, abs=16)


def test_a_step_without_decoding_sequences_is_as_large_as_a_second_allows() -> None:
    budget = StepBudget(chunk_size=2048, target_s=0.1)
    assert budget.prefill_tokens(0) == 512
    for rate, tokens in ((10_000, 2048), (1_000, 992), (100, 512)):
        for _ in range(100):
            budget.measured(0, 512, 512 / rate)
        assert budget.prefill_tokens(0) == pytest.approx(tokens, abs=16)
