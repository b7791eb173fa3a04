"""Which evictable copy of a pool is evicted next: by recency, by frequency, or by the cost of recomputing it.

All three rely on one rule of the cache: a lease releases its pages from the deepest up to the root. So in each queue
a parent is behind its children, and the first copy is always a leaf of its tier: nothing is scanned, no leaves are
counted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from forebay.engine.cache.radix.node import CachedPage, Node

__all__ = ["CostQueue", "EvictionQueue", "LfuQueue", "LruQueue", "make_queue"]


class EvictionQueue(Protocol):
    """The evictable copies of one pool, in the order of eviction."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[CachedPage]:
        """In the order of eviction (for reports and checks)."""

    def add(self, copy: CachedPage) -> None:
        """``copy`` became evictable; it was used just now."""

    def remove(self, copy: CachedPage) -> None:
        """``copy`` is locked again, or dropped."""

    def add_all(self, copies: list[CachedPage]) -> None:
        """Add several, the one to be evicted first comes first."""

    def remove_all(self, copies: list[CachedPage]) -> None:
        """Remove several."""

    def first(self) -> CachedPage | None:
        """The next to be evicted; it stays in the queue."""


class _Ring:
    """An intrusive doubly linked list around a sentinel."""

    __slots__ = ("head",)

    def __init__(self) -> None:
        head = CachedPage(Node(None, b""), -1)
        head.prev = head.next = head
        self.head = head

    def append(self, copy: CachedPage) -> None:
        head = self.head
        last = head.prev
        copy.prev = last
        copy.next = head
        last.next = copy  # type: ignore[union-attr]
        head.prev = copy

    @staticmethod
    def unlink(copy: CachedPage) -> None:
        before, after = copy.prev, copy.next
        before.next = after  # type: ignore[union-attr]
        after.prev = before  # type: ignore[union-attr]
        copy.prev = None

    def __iter__(self) -> Iterator[CachedPage]:
        copy = self.head.next
        while copy is not self.head:
            assert copy is not None, "a copy was unlinked while listed"
            yield copy
            copy = copy.next


class LruQueue:
    """Least recently used first; pages of one use deepest first. Every operation is O(1)."""

    __slots__ = ("_count", "_ring")

    def __init__(self) -> None:
        self._ring = _Ring()
        self._count = 0

    @property
    def sentinel(self) -> CachedPage:
        """The native functions append before it, and report how many with ``counted``."""
        return self._ring.head

    def counted(self, more: int) -> None:
        """So many copies were linked (or, if negative, unlinked) by the native functions."""
        self._count += more

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[CachedPage]:
        return iter(self._ring)

    def add(self, copy: CachedPage) -> None:
        # _Ring.append, inlined: this and ``remove`` run for every page of every request.
        head = self._ring.head
        last = head.prev
        copy.prev = last
        copy.next = head
        last.next = copy  # type: ignore[union-attr]
        head.prev = copy
        self._count += 1

    def remove(self, copy: CachedPage) -> None:
        before, after = copy.prev, copy.next
        before.next = after  # type: ignore[union-attr]
        after.prev = before  # type: ignore[union-attr]
        copy.prev = None
        self._count -= 1

    def add_all(self, copies: list[CachedPage]) -> None:
        head = self._ring.head
        last = head.prev
        for copy in copies:
            copy.prev = last
            last.next = copy  # type: ignore[union-attr]
            last = copy
        last.next = head  # type: ignore[union-attr]
        head.prev = last
        self._count += len(copies)

    def remove_all(self, copies: list[CachedPage]) -> None:
        for copy in copies:
            before, after = copy.prev, copy.next
            before.next = after  # type: ignore[union-attr]
            after.prev = before  # type: ignore[union-attr]
            copy.prev = None
        self._count -= len(copies)

    def first(self) -> CachedPage | None:
        return self._ring.head.next if self._count else None


class LfuQueue:
    """Least often used first, and among equals least recently used. Every operation is O(1).

    Uses are counted up to ``MAX_USES``.
    """

    MAX_USES = 255
    __slots__ = ("_count", "_occupied", "_rings")

    def __init__(self) -> None:
        self._rings: list[_Ring | None] = [None] * (self.MAX_USES + 1)
        self._occupied = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[CachedPage]:
        return itertools.chain.from_iterable(r for r in self._rings if r is not None)

    def add(self, copy: CachedPage) -> None:
        uses = min(copy.node.hits, self.MAX_USES)
        ring = self._rings[uses]
        if ring is None:
            ring = self._rings[uses] = _Ring()
        ring.append(copy)
        copy.rank = uses
        self._occupied |= 1 << uses
        self._count += 1

    def remove(self, copy: CachedPage) -> None:
        _Ring.unlink(copy)
        uses = int(copy.rank)
        ring = self._rings[uses]
        assert ring is not None, "a copy is listed under a count that has no list"
        if ring.head.next is ring.head:
            self._occupied &= ~(1 << uses)
        self._count -= 1

    def add_all(self, copies: list[CachedPage]) -> None:
        for copy in copies:
            self.add(copy)

    def remove_all(self, copies: list[CachedPage]) -> None:
        for copy in copies:
            self.remove(copy)

    def first(self) -> CachedPage | None:
        if not self._occupied:
            return None
        ring = self._rings[(self._occupied & -self._occupied).bit_length() - 1]
        assert ring is not None, "an occupied count has no list"
        return ring.head.next


class CostQueue:
    """The lowest value first: the cost of recomputing a page times the number of its uses. O(log n).

    The value of a page is ``clock + uses x cost(page number)``. The clock is the value of the last evicted page, so
    pages that were popular once are evicted in the end (the GreedyDual-Size-Frequency rule, Cherkasova 1998). A
    parent's value is at least that of the child that was released with it.
    """

    __slots__ = ("_clock", "_cost", "_heap", "_last", "_live", "_serial")

    def __init__(self, cost: Callable[[int], float]) -> None:
        self._cost = cost
        self._clock = 0.0
        self._heap: list[tuple[float, int, CachedPage]] = []
        self._live: dict[CachedPage, int] = {}
        self._serial = 0
        self._last: CachedPage | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[CachedPage]:
        return (copy for _, serial, copy in sorted(self._heap, key=lambda e: e[:2]) if self._live.get(copy) == serial)

    def add(self, copy: CachedPage) -> None:
        node = copy.node
        value = self._clock + node.hits * self._cost(node.depth)
        last = self._last
        if last is not None and last.node.parent is node and last.rank > value:
            value = last.rank
        copy.rank = value
        copy.prev = copy  # in no list, but queued
        self._last = copy
        self._serial += 1
        self._live[copy] = self._serial
        heapq.heappush(self._heap, (value, self._serial, copy))

    def remove(self, copy: CachedPage) -> None:
        del self._live[copy]
        copy.prev = None
        if self._last is copy:
            self._last = None
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._live):
            self._heap = [e for e in self._heap if self._live.get(e[2]) == e[1]]
            heapq.heapify(self._heap)

    def add_all(self, copies: list[CachedPage]) -> None:
        for copy in copies:
            self.add(copy)

    def remove_all(self, copies: list[CachedPage]) -> None:
        for copy in copies:
            self.remove(copy)

    def first(self) -> CachedPage | None:
        heap = self._heap
        while heap:
            value, serial, copy = heap[0]
            if self._live.get(copy) == serial:
                self._clock = max(self._clock, value)
                return copy
            heapq.heappop(heap)
        return None


def make_queue(eviction: str, cost: Callable[[int], float]) -> EvictionQueue:
    """The queue for ``lru``, ``lfu`` or ``cost``; ``cost(page number)`` is the relative cost of recomputing that
    page."""
    if eviction == "lru":
        return LruQueue()
    if eviction == "lfu":
        return LfuQueue()
    assert eviction == "cost", f"unknown eviction policy {eviction!r}"
    return CostQueue(cost)
