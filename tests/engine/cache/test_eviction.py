"""The three orders of eviction against plain definitions, and that their cost does not grow with the tree."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
from cache_world import tier_config
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engine.cache.config import Eviction
from forebay.engine.cache.pools.eviction import CostQueue, EvictionQueue, LfuQueue, LruQueue, make_queue
from forebay.engine.cache.prefix_cache import PrefixCache
from forebay.engine.cache.radix.node import CachedPage, Node
from forebay.kv.spec import KVSpec, LayerGroup, Part

SPEC = KVSpec((LayerGroup("full", (0,), (Part("k", 1, 1, 2),)),), page_size=4)


def copies(count: int) -> list[CachedPage]:
    root = Node(None, b"")
    return [CachedPage(Node(root, bytes([i])), i) for i in range(count)]


OPERATIONS = st.lists(st.tuples(st.sampled_from(["add", "remove", "use", "evict"]), st.integers(0, 9)), max_size=80)


@pytest.mark.parametrize("make", [LruQueue, LfuQueue, lambda: CostQueue(lambda depth: 1.0)])
@settings(max_examples=120, deadline=None)
@given(operations=OPERATIONS)
def test_the_order_is_that_of_the_definition(make: type[LruQueue], operations: list[tuple[str, int]]) -> None:
    queue: EvictionQueue = make()
    pages = copies(10)
    queued: dict[CachedPage, tuple[float, int]] = {}
    clock = 0.0

    def rank(copy: CachedPage, now: int) -> tuple[float, int]:
        if isinstance(queue, LruQueue):
            return 0, now
        uses = copy.node.hits
        return (uses if isinstance(queue, LfuQueue) else clock + uses), now

    for now, (operation, which) in enumerate(operations):
        copy = pages[which]
        if operation == "add" and copy not in queued:
            queue.add(copy)
            queued[copy] = rank(copy, now)
        elif operation == "remove" and copy in queued:
            queue.remove(copy)
            del queued[copy]
        elif operation == "use":
            if copy in queued:
                queue.remove(copy)
                del queued[copy]
            copy.node.hits += 1
            queue.add(copy)
            queued[copy] = rank(copy, now)
        elif operation == "evict" and queued:
            first = queue.first()
            assert first is min(queued, key=queued.__getitem__)
            clock = max(clock, queued[first][0])
            queue.remove(first)
            del queued[first]
        assert len(queue) == len(queued)
        assert {c for c in pages if c.prev is not None} == set(queued)
    assert list(queue) == sorted(queued, key=queued.__getitem__)


def test_a_page_that_costs_more_to_recompute_stays_longer() -> None:
    queue = CostQueue(lambda depth: 1.0 + depth)
    root = Node(None, b"")
    shallow = Node(root, b"a")
    above = Node(Node(Node(root, b"b"), b"c"), b"d")
    deep = Node(above, b"e")
    for node in (deep, shallow):
        node.hits = 1
        queue.add(CachedPage(node, 0))
    first = queue.first()
    assert first is not None
    assert first.node is shallow


def test_once_popular_pages_are_overtaken() -> None:
    queue = CostQueue(lambda depth: 1.0)
    popular, *others = copies(30)
    popular.node.hits = 10
    queue.add(popular)
    gone = []
    for copy in others:
        copy.node.hits = 1
        queue.add(copy)
        first = queue.first()
        assert first is not None
        queue.remove(first)
        gone.append(first)
    assert popular in gone


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.LFU])
def test_evicting_takes_the_same_steps_at_any_size(eviction: Eviction) -> None:
    """Counted in executed lines, so that a busy machine does not matter."""

    def steps(pages: int) -> int:
        cache = PrefixCache(SPEC, tier_config(device_pages=(pages,), eviction=eviction))
        rng = np.random.default_rng(0)
        for _ in range(pages // 8):
            tokens = rng.integers(0, 9999, 32, dtype=np.int32)
            lease = cache.open(tokens)
            assert lease is not None
            assert cache.extend(lease, 32)
            cache.commit(lease, tokens)
            cache.close(lease)
        lease = cache.open(rng.integers(0, 9999, 33, dtype=np.int32))
        assert lease is not None
        count = 0

        def trace(*_: object) -> object:
            nonlocal count
            count += 1
            return trace

        # A collection in between would be counted: others have callbacks in it.
        gc.disable()
        sys.settrace(trace)
        try:
            assert cache.extend(lease, 32)
        finally:
            sys.settrace(None)
            gc.enable()
        return count

    assert steps(4096) == steps(64)


def test_the_policy_of_the_configuration_is_the_queue() -> None:
    assert isinstance(make_queue("lru", float), LruQueue)
    assert isinstance(make_queue("lfu", float), LfuQueue)
    assert isinstance(make_queue("cost", float), CostQueue)
