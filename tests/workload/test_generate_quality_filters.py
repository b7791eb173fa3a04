"""Quality filters: which answers they match, and what is done then."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.workload.answers import CompletionAnswer
from forebay.workload.failures import FailureKind, RequestFailure
from forebay.workload.generate.quality_filters import FilterAction, FilterPolicy, QualityFilter, check_answer, repeats
from forebay.workload.generate.rows import Row
from forebay.workload.generate.settings import GenerateSettings, Sampling
from forebay.workload.generate.turns import Turn, WorkItem, ask_turn

_POLICY = FilterPolicy.default()


def _answer(content: str, finish: str = "stop", reasoning: str | None = None) -> CompletionAnswer:
    return CompletionAnswer(content, reasoning, finish, None)


@pytest.mark.parametrize(
    ("answer", "filters"),
    [
        (_answer("fine"), []),
        (_answer(" \n"), [QualityFilter.EMPTY]),
        (_answer("cut", "length"), [QualityFilter.TRUNCATED]),
        (_answer("<think>hm"), [QualityFilter.UNCLOSED_REASONING]),
        (_answer("<think>hm</think>yes"), []),
        (_answer("", "length", "hm hm"), [QualityFilter.UNCLOSED_REASONING, QualityFilter.TRUNCATED]),
        (_answer("", "stop", "hm"), [QualityFilter.EMPTY]),
        (_answer("and so on " * 40), [QualityFilter.REPEATING]),
        (_answer("yes", "stop", "wait, " * 60), [QualityFilter.REPEATING]),
    ],
)
def test_each_filter_matches_its_fault(answer: CompletionAnswer, filters: list[QualityFilter]) -> None:
    assert check_answer(answer, _POLICY) == filters


@given(st.text(min_size=1, max_size=40), st.text(max_size=300))
def test_a_unit_many_times_over_is_a_loop_whatever_came_before(unit: str, before: str) -> None:
    times = max(12, 400 // len(unit) + 1)
    assert repeats(before + unit * times)


@given(st.lists(st.integers(0, 10**6), min_size=60, max_size=200, unique=True))
def test_text_that_goes_on_saying_new_things_is_no_loop(numbers: list[int]) -> None:
    assert not repeats(" ".join(f"step {number}" for number in numbers))


def _ask(
    answers: list[CompletionAnswer | RequestFailure], policy: FilterPolicy, temperature: float = 0.0
) -> tuple[Turn, list[int]]:
    settings = GenerateSettings(Path("in"), Path("out"), (), Sampling(max_tokens=10, temperature=temperature), policy)
    asked: list[int] = []

    async def chat(body: dict[str, Any]) -> CompletionAnswer:
        asked.append(body["max_tokens"])
        answer = answers[len(asked) - 1]
        if isinstance(answer, RequestFailure):
            raise answer
        return answer

    work = WorkItem(bytes(16), Row(bytes(16), None, (), ("q",)))
    return asyncio.run(ask_turn(settings, "m", work, chat)), asked


_RETRY = replace(_POLICY, actions=dict.fromkeys(QualityFilter, FilterAction.RETRY))


def test_a_cut_answer_is_asked_again_with_twice_the_tokens_until_it_ends() -> None:
    turn, asked = _ask([_answer("a", "length"), _answer("b", "length"), _answer("c")], _RETRY)
    assert (turn.answer.content, turn.rejected, turn.attempts, asked) == ("c", None, 3, [10, 20, 40])


def test_retries_end_in_rejection() -> None:
    turn, asked = _ask([_answer("a", "length")] * 3, _RETRY)
    assert (turn.rejected, asked) == (QualityFilter.TRUNCATED, [10, 20, 40])


def test_a_longer_retry_that_the_server_refuses_leaves_the_answer_before_it() -> None:
    turn, _ = _ask([_answer("a", "length"), RequestFailure(FailureKind.REFUSED, "too long")], _RETRY)
    assert (turn.answer.content, turn.rejected) == ("a", QualityFilter.TRUNCATED)


def test_asking_again_the_same_way_is_no_retry() -> None:
    """At temperature 0 an empty answer stays empty: it is rejected at once; a sampled one is asked again."""
    assert _ask([_answer("")], _RETRY)[1] == [10]
    assert _ask([_answer(""), _answer("yes")], _RETRY, temperature=1.0)[1] == [10, 10]


def test_filters_that_keep_an_answer_are_still_recorded() -> None:
    turn, _ = _ask([_answer("a", "length")], replace(_POLICY, actions=dict.fromkeys(QualityFilter, FilterAction.KEEP)))
    assert (turn.rejected, turn.filters) == (None, [QualityFilter.TRUNCATED])
