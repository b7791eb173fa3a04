"""Is an answer good enough: four checks, and what the user wants done about each."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from forebay.workload.answers import CompletionAnswer

__all__ = ["FilterAction", "FilterPolicy", "QualityFilter", "check_answer", "repeats"]


class QualityFilter(StrEnum):
    """Why an answer may be unfit; the order is the order of judgement."""

    UNCLOSED_REASONING = "unclosed_reasoning"
    EMPTY = "empty"
    REPEATING = "repeating"
    TRUNCATED = "truncated"


class FilterAction(StrEnum):
    """What to do with an unfit answer. ``retry`` asks again with twice the tokens, then sets aside."""

    KEEP = "keep"
    RETRY = "retry"
    SET_ASIDE = "set-aside"


_DEFAULTS = {
    QualityFilter.UNCLOSED_REASONING: FilterAction.RETRY,
    QualityFilter.EMPTY: FilterAction.RETRY,
    QualityFilter.REPEATING: FilterAction.SET_ASIDE,
    QualityFilter.TRUNCATED: FilterAction.KEEP,
}
_TAIL = 2000  # characters of the end that are searched for a loop
_LOOP_CHARS = 200  # a loop covers at least so many characters
_LOOP_TIMES = 6  # and repeats its unit at least so often
_SUSPECT_RATIO = 3.0  # a tail that compresses less than this has no such loop


@dataclass(frozen=True, slots=True)
class FilterPolicy:
    """The user's choice for each gate, and how far ``retry`` goes."""

    actions: Mapping[QualityFilter, FilterAction]
    retries: int = 2  # asks after the first; each doubles max_tokens
    open_tag: str = "<think>"
    close_tag: str = "</think>"

    @classmethod
    def default(cls) -> FilterPolicy:
        """Keep truncated answers (a draft model learns from them all the same), retry or set aside the rest."""
        return cls(dict(_DEFAULTS))

    def action(self, gates: list[QualityFilter]) -> FilterAction:
        """The strictest action any of the gates asks for."""
        wanted = {self.actions[gate] for gate in gates}
        for action in (FilterAction.SET_ASIDE, FilterAction.RETRY):
            if action in wanted:
                return action
        return FilterAction.KEEP


def check_answer(answer: CompletionAnswer, policy: FilterPolicy) -> list[QualityFilter]:
    """Every gate the answer falls at; empty when it is fit."""
    gates = []
    cut = answer.finish_reason == "length"
    content = answer.content
    blank = not content.strip()
    reasoning_open = content.rfind(policy.open_tag) > content.rfind(policy.close_tag)
    if reasoning_open or (cut and blank and bool(answer.reasoning)):
        gates.append(QualityFilter.UNCLOSED_REASONING)
    elif blank:
        gates.append(QualityFilter.EMPTY)
    if repeats(content) or (answer.reasoning is not None and repeats(answer.reasoning)):
        gates.append(QualityFilter.REPEATING)
    if cut:
        gates.append(QualityFilter.TRUNCATED)
    return gates


def repeats(text: str) -> bool:
    """True when the end of the text is a loop: one unit, at least 6 times over, over at least 200 characters."""
    tail = text[-_TAIL:]
    if len(tail) < _LOOP_CHARS:
        return False
    raw = tail.encode("utf-8", "surrogatepass")
    if len(raw) < _SUSPECT_RATIO * len(zlib.compress(raw, 1)):
        return False
    return _loop_length(tail[::-1]) >= _LOOP_CHARS


def _loop_length(text: str) -> int:
    """The longest prefix that is a unit repeated at least ``_LOOP_TIMES`` times (Knuth,
    Morris and Pratt's failure function).
    """
    failure = [0] * len(text)
    matched = best = 0
    for at in range(1, len(text)):
        while matched and text[at] != text[matched]:
            matched = failure[matched - 1]
        if text[at] == text[matched]:
            matched += 1
        failure[at] = matched
        length = at + 1
        if length >= _LOOP_TIMES * (length - matched):
            best = length
    return best
