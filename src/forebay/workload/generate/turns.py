"""One turn of one row: the request, the quality filters, and the retries."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from forebay.workload.answers import CompletionAnswer
from forebay.workload.failures import FailureKind, RequestFailure
from forebay.workload.generate.journal import history_digest
from forebay.workload.generate.quality_filters import FilterAction, QualityFilter, check_answer
from forebay.workload.generate.rows import Row
from forebay.workload.generate.settings import GenerateSettings

__all__ = ["Turn", "WorkItem", "ask_turn"]

_MORE_TOKENS_HELP = frozenset({QualityFilter.TRUNCATED, QualityFilter.UNCLOSED_REASONING})


@dataclass(slots=True)
class WorkItem:
    """A pending row with its answers so far; ``history`` is their digest. Add answers with ``add``."""

    key: bytes
    row: Row
    answers: list[str] = field(default_factory=list)
    history: str = ""
    tries: int = 0

    def add(self, answer: str) -> None:
        """Add the next turn's answer."""
        self.answers.append(answer)
        self.history = history_digest(self.history, answer)

    @property
    def hex_key(self) -> str:
        """The key as the journal holds it."""
        return self.key.hex()


@dataclass(frozen=True, slots=True)
class Turn:
    """A generated turn. ``filters`` matched its answer; ``rejected`` is the filter that ends the row, None when the
    answer is kept.
    """

    answer: CompletionAnswer
    filters: list[QualityFilter]
    attempts: int
    rejected: QualityFilter | None


def request_body(
    settings: GenerateSettings, model: str, work: WorkItem, max_tokens: int, attempt: int
) -> dict[str, Any]:
    """The body of one request; a pure function of the row, the turn and the attempt."""
    sampling = settings.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": work.row.messages(work.answers),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
    }
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if sampling.seed is not None:
        salt = b"%d %d %d" % (sampling.seed, len(work.answers), attempt)
        body["seed"] = int.from_bytes(hashlib.blake2b(work.key + salt, digest_size=4).digest(), "big") >> 1
    body.update(sampling.extra)
    return body


async def ask_turn(
    settings: GenerateSettings,
    model: str,
    work: WorkItem,
    chat: Callable[[dict[str, Any]], Awaitable[CompletionAnswer]],
) -> Turn:
    """Generate the next answer of ``work`` (whose answers are left as they are).

    Raises:
        RequestFailure: a request brought no answer. A retry that the server refuses for its length is not an error: the
            answer before it is rejected.
    """
    policy = settings.filters
    max_tokens = settings.sampling.max_tokens
    before: Turn | None = None
    for attempt in range(1, policy.retries + 2):
        try:
            answer = await chat(request_body(settings, model, work, max_tokens, attempt - 1))
        except RequestFailure as failure:
            if before is not None and failure.kind is FailureKind.REFUSED:
                return before
            raise
        filters = check_answer(answer, policy)
        action = policy.action(filters)
        if action is FilterAction.KEEP:
            return Turn(answer, filters, attempt, None)
        decisive = next(name for name in filters if policy.actions[name] is action)
        before = Turn(answer, filters, attempt, decisive)
        longer = any(name in _MORE_TOKENS_HELP for name in filters)
        if action is FilterAction.REJECT or not (longer or settings.sampling.temperature > 0):
            break
        if longer:
            max_tokens *= 2
    assert before is not None, "the loop runs at least once"
    return before
