"""Quality filters: four checks of an answer, and what is done when one matches."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from forebay.workload.answers import CompletionAnswer

__all__ = ["FilterAction", "FilterPolicy", "QualityFilter", "check_answer", "repeats"]


class QualityFilter(StrEnum):
    """What is wrong with an answer; filters are checked in this order."""

    UNCLOSED_REASONING = "unclosed_reasoning"
    EMPTY = "empty"
    REPEATING = "repeating"
    TRUNCATED = "truncated"


class FilterAction(StrEnum):
    """What is done with an answer that a filter matches. ``retry`` asks again, with twice the tokens where that helps,
    then rejects.
    """

    KEEP = "keep"
    RETRY = "retry"
    REJECT = "reject"


_DEFAULTS = {
    QualityFilter.UNCLOSED_REASONING: FilterAction.RETRY,
    QualityFilter.EMPTY: FilterAction.RETRY,
    QualityFilter.REPEATING: FilterAction.REJECT,
    QualityFilter.TRUNCATED: FilterAction.KEEP,
}
_TAIL = 2000  # characters of the end that are searched for a loop
_LOOP_CHARS = 200  # least length of a loop in characters
_LOOP_TIMES = 6  # least number of repetitions of its unit
_SUSPECT_RATIO = 3.0  # a tail that compresses less than this has no such loop


@dataclass(frozen=True, slots=True)
class FilterPolicy:
    """The action of each filter, how often ``retry`` asks again, and the tags around reasoning."""

    actions: Mapping[QualityFilter, FilterAction]
    retries: int = 2  # asks after the first; each doubles max_tokens
    open_tag: str = "<think>"
    close_tag: str = "</think>"

    @classmethod
    def default(cls) -> FilterPolicy:
        """Keep truncated answers (they are still training data for a draft model), retry or reject the rest."""
        return cls(dict(_DEFAULTS))

    def action(self, filters: list[QualityFilter]) -> FilterAction:
        """The strictest action among those of the filters."""
        wanted = {self.actions[filter_] for filter_ in filters}
        for action in (FilterAction.REJECT, FilterAction.RETRY):
            if action in wanted:
                return action
        return FilterAction.KEEP


def check_answer(answer: CompletionAnswer, policy: FilterPolicy) -> list[QualityFilter]:
    """Every filter that matches the answer."""
    filters = []
    cut = answer.finish_reason == "length"
    content = answer.content
    blank = not content.strip()
    reasoning_open = content.rfind(policy.open_tag) > content.rfind(policy.close_tag)
    if reasoning_open or (cut and blank and bool(answer.reasoning)):
        filters.append(QualityFilter.UNCLOSED_REASONING)
    elif blank:
        filters.append(QualityFilter.EMPTY)
    if repeats(content) or (answer.reasoning is not None and repeats(answer.reasoning)):
        filters.append(QualityFilter.REPEATING)
    if cut:
        filters.append(QualityFilter.TRUNCATED)
    return filters


def repeats(text: str) -> bool:
    """Whether the end of the text is a loop: one unit, repeated at least 6 times, over at least 200 characters."""
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
