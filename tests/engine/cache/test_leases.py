"""What a lease promises, with the device tier alone."""

from __future__ import annotations

import numpy as np
import pytest
from cache_world import tier_config

from forebay.engine.cache.config import Eviction
from forebay.engine.cache.interface import Tier
from forebay.engine.cache.prefix_cache import PrefixCache
from forebay.kv.spec import KVSpec, LayerGroup, Part

PARTS = (Part("k", 2, 4, 2), Part("v", 2, 4, 2))
FULL = KVSpec((LayerGroup("full", (0, 1), PARTS),), page_size=4)
HYBRID = KVSpec((LayerGroup("full", (1,), PARTS), LayerGroup("sliding", (0, 2), PARTS, window=6)), page_size=4)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def run(cache: PrefixCache, sequence: np.ndarray, new: int = 0) -> int:
    """One request that computes ``sequence`` and ``new`` tokens more; returns the cached tokens."""
    lease = cache.open(sequence)
    assert lease is not None
    whole = np.concatenate([sequence, np.arange(9_000, 9_000 + new, dtype=np.int32)])
    assert cache.extend(lease, len(whole))
    cache.commit(lease, whole)
    cache.check()
    cache.close(lease)
    cache.check()
    return lease.cached.total


def test_a_second_request_finds_the_full_pages_of_the_first() -> None:
    cache = PrefixCache(FULL, tier_config(device_pages=(16,)))
    prompt = tokens(*range(10))
    assert run(cache, prompt) == 0
    assert run(cache, prompt) == 8
    assert run(cache, tokens(0, 1, 2, 3, 7, 7, 7, 7, 8)) == 4


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    cache = PrefixCache(FULL, tier_config(device_pages=(16,)))
    prompt = tokens(*range(8))
    run(cache, prompt)
    assert run(cache, prompt) == 4


def test_two_leases_that_compute_one_page_share_the_first_ones() -> None:
    cache = PrefixCache(FULL, tier_config(device_pages=(16,)))
    prompt = tokens(*range(5))
    one, two = cache.open(prompt), cache.open(prompt)
    assert one is not None
    assert two is not None
    for lease in (one, two):
        assert cache.extend(lease, 5)
    cache.commit(one, prompt)
    cache.commit(two, prompt)
    cache.check()
    assert one.page_tables[0][0] == two.page_tables[0][0]
    assert one.page_tables[0][1] != two.page_tables[0][1]
    cache.close(one)
    cache.close(two)
    cache.check()


def test_extend_is_all_or_nothing_and_spares_what_is_in_use() -> None:
    cache = PrefixCache(FULL, tier_config(device_pages=(4,)))
    one = cache.open(tokens(*range(9)))
    assert one is not None
    assert cache.extend(one, 9)
    cache.commit(one, tokens(*range(9)))
    two = cache.open(tokens(*range(100, 120)))
    assert two is not None
    assert not cache.extend(two, 8)
    assert two.num_pages == 0
    assert cache.extend(two, 4)
    assert not cache.extend(one, 13)
    cache.close(one)
    assert cache.extend(two, 16)
    cache.check()


@pytest.mark.parametrize("eviction", list(Eviction))
def test_a_prefix_never_goes_before_what_hangs_on_it(eviction: Eviction) -> None:
    cache = PrefixCache(FULL, tier_config(device_pages=(6,), eviction=eviction))
    run(cache, tokens(*range(17)))
    other = cache.open(tokens(*range(100, 120)))
    assert other is not None
    assert cache.extend(other, 4 * 4)
    cache.close(other)
    assert run(cache, tokens(*range(17))) == 8


def test_the_least_recently_used_sequence_goes_first() -> None:
    cache = PrefixCache(FULL, tier_config(device_pages=(6,)))
    run(cache, tokens(*range(9)))
    run(cache, tokens(*range(100, 109)))
    run(cache, tokens(*range(9)))
    run(cache, tokens(*range(200, 209)))
    assert run(cache, tokens(*range(9))) == 8
    # Room for one page was needed: the deepest of the older sequence went.
    assert run(cache, tokens(*range(100, 109))) == 4


def test_a_window_frees_the_pages_that_nothing_can_read() -> None:
    cache = PrefixCache(HYBRID, tier_config(device_pages=(16, 16)))
    prompt = tokens(*range(20))
    lease = cache.open(prompt)
    assert lease is not None
    assert cache.extend(lease, 20)
    cache.commit(lease, prompt)
    full, sliding = lease.page_tables
    assert (full >= 0).all()
    # The token at position 20 reads 15 .. 19: pages 0 to 2 are over.
    assert [int(p) >= 0 for p in sliding] == [False, False, False, True, True]
    cache.check()
    cache.close(lease)
    assert run(cache, tokens(*range(21))) == 20


def test_a_prefix_counts_only_where_the_window_before_it_is_whole() -> None:
    cache = PrefixCache(HYBRID, tier_config(device_pages=(16, 5)))
    run(cache, tokens(*range(20)))
    # Five other sliding pages push out the old ones; the full group still has all of the first sequence.
    run(cache, tokens(*range(100, 116)))
    assert run(cache, tokens(*range(13))) == 0
    cache.check()


def test_flush_drops_what_is_not_in_use() -> None:
    cache = PrefixCache(FULL, tier_config(device_pages=(16,)))
    run(cache, tokens(*range(9)))
    lease = cache.open(tokens(*range(5)))
    assert lease is not None
    assert cache.flush(Tier.DEVICE) == {"device": 1}
    cache.check()
    cache.close(lease)
    assert run(cache, tokens(*range(9))) == 4
