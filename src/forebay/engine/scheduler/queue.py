"""Sequences that hold no pages, in order of arrival; a preempted one returns to its old place."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from forebay.engine.scheduler.sequence import Sequence

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Ordered by ``seq_id``, which the front gives out in order of arrival."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Sequence]:
        """Oldest first; the queue may be changed meanwhile."""
        return (self._sequences[seq_id] for seq_id in tuple(self._ids) if seq_id in self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Put ``sequence`` in its place: at the end when new, before all younger ones when preempted."""
        bisect.insort(self._ids, sequence.seq_id)
        self._sequences[sequence.seq_id] = sequence

    def remove(self, seq_id: int) -> Sequence | None:
        """Take a sequence out; None when it is not here."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            del self._ids[bisect.bisect_left(self._ids, seq_id)]
        return sequence
