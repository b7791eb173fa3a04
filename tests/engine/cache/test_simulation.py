"""One request at a time, the cache's hits per tier are those of a simulation a page long: LRU by page,
deepest first.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from cache_world import FULL, World, tier_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.engine.cache.config import LoadPolicy, WritePolicy
from forebay.engine.cache.interface import CachedTokens

PAGE = FULL.page_size
Prefix = tuple[int, ...]


class Tier:
    """Pages by recency, the next to go first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: OrderedDict[Prefix, None] = OrderedDict()

    def touch(self, pages: list[Prefix]) -> None:
        for page in reversed(pages):
            self.order.pop(page, None)
            self.order[page] = None

    def make_room(self, count: int, in_use: list[Prefix]) -> None:
        """Evict until ``count`` pages fit beside what is there."""
        held = set(in_use)
        for page in [p for p in self.order if p not in held]:
            if len(self.order) + count <= self.size:
                return
            del self.order[page]


def simulate(requests: list[tuple[list[int], int]], device_pages: int, host_pages: int) -> list[CachedTokens]:
    device, host = Tier(device_pages), Tier(host_pages)
    results = []
    for kinds, tail in requests:
        pages = [tuple(kinds[: i + 1]) for i in range(len(kinds))]
        usable = len(pages) if tail else len(pages) - 1
        hits = 0
        while hits < usable and (pages[hits] in device.order or pages[hits] in host.order):
            hits += 1
        from_device = sum(page in device.order for page in pages[:hits])
        results.append(CachedTokens(device=PAGE * from_device, host=PAGE * (hits - from_device)))
        # The rest of the prefix is loaded, the rest of the request is computed, the last page may stay partial.
        used = pages[:hits]
        device.make_room(hits - from_device, used)
        device.touch(used)
        new = [page for page in pages if page not in used]
        device.make_room(len(new) + (tail > 0), used)
        device.touch(pages)
        to_host = [page for page in pages if page not in host.order]
        host.make_room(len(to_host), pages)
        host.touch(pages)
    return results


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)), max_size=40),
    device_pages=st.integers(7, 12),
    host_pages=st.integers(12, 40),
)
def test_hits_are_those_of_the_simulation_to_the_token(
    requests: list[tuple[list[int], int]], device_pages: int, host_pages: int
) -> None:
    config = tier_config(
        device_pages=(device_pages,),
        host_bytes=host_pages * FULL.page_bytes(0),
        write_policy=WritePolicy.WRITE_THROUGH,
        load=LoadPolicy.ALWAYS,
    )
    world = World(FULL, config)
    expected = simulate(requests, device_pages, host_pages)
    for (kinds, tail), cached in zip(requests, expected):
        body = [np.full(PAGE, 10 * i + kind, dtype=np.int32) for i, kind in enumerate(kinds)]
        assert world.run(np.concatenate([*body, np.arange(tail, dtype=np.int32)])).cached == cached
    world.close()
