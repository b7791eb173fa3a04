"""A page's way down and up again, with the host and disk tiers; device memory holds real bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cache_world import FULL, HYBRID, LATENT, World, disk_config, tier_config, tokens

from forebay.engine.cache.config import LoadPolicy, TierConfig, WritePolicy
from forebay.engine.cache.interface import CachedTokens, Tier
from forebay.kv.spec import KVSpec

A = tokens(*range(13))
B = tokens(*range(100, 113))


def config(**settings: object) -> TierConfig:
    """A device of 6 pages over a host of 32."""
    defaults: dict[str, object] = {"device_pages": (6,), "host_bytes": 32 * FULL.page_bytes(0)}
    return tier_config(**{**defaults, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_what_the_device_evicted_comes_back_from_the_host(policy: WritePolicy) -> None:
    world = World(FULL, config(write_policy=policy))
    world.run(A)
    world.run(B)
    world.run(tokens(*range(200, 213)))
    assert world.run(A).cached == CachedTokens(host=12)
    world.close()


def test_selective_keeps_only_what_was_used_twice() -> None:
    world = World(FULL, config(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, device_pages=(16,)))
    world.run(A)
    world.run(A)
    world.run(B)
    assert world.cache.flush(Tier.DEVICE) == {"device": 6}
    assert world.run(B).cached.total == 0
    assert world.run(A).cached == CachedTokens(host=12)
    world.close()


def test_write_back_saves_on_eviction_and_not_before() -> None:
    world = World(FULL, config(write_policy=WritePolicy.WRITE_BACK, device_pages=(16,)))
    world.run(A)
    assert world.cache.stats()["pages"].get("device_host", 0) == 0
    world.cache.flush(Tier.DEVICE)
    assert world.cache.stats()["pages"]["device_host"] == 3
    assert world.run(A).cached == CachedTokens(host=12)
    world.close()


def test_a_flush_does_not_keep_running_requests_waiting() -> None:
    world = World(FULL, config(device_pages=(16,)))
    world.run(B)
    lease = world.cache.open(A)
    assert lease is not None
    assert world.cache.extend(lease, len(A))
    world.compute(lease, A, 0)
    world.cache.commit(lease, A)
    world.cache.process_completions()
    assert world.cache.offload.backups, "the backup is over before the flush"
    assert world.cache.flush(Tier.DEVICE) == {"device": 3}
    assert world.cache.offload.backups, "the flush waited for the transfer of a running request"
    world.verify(lease, A)
    world.cache.close(lease)
    assert world.cache.drain(1.0)
    assert world.run(A).cached == CachedTokens(device=12)
    assert world.run(B).cached.host > 0
    world.close()


def test_two_requests_share_one_load() -> None:
    world = World(FULL, config(device_pages=(16,)))
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    one, two = world.cache.open(A), world.cache.open(A)
    assert one is not None
    assert two is not None
    assert one.cached == two.cached == CachedTokens(host=12)
    assert len(world.cache.load_back.loads) == 1
    assert world.wait(one)
    assert world.wait(two)
    world.verify(two, A)
    world.cache.process_completions()
    assert one.layer_events is None
    assert two.layer_events is None
    world.cache.close(one)
    world.cache.close(two)
    world.cache.check()
    world.close()


def test_a_lease_closed_while_its_pages_arrive_leaves_nothing_behind() -> None:
    world = World(FULL, config(device_pages=(16,)))
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    lease = world.cache.open(A)
    assert lease is not None
    world.cache.close(lease)
    world.cache.check()
    assert world.cache.drain(1.0)
    world.cache.check()
    assert world.run(A).cached == CachedTokens(device=12)
    world.close()


def test_open_is_refused_without_change_when_a_load_finds_no_device_pages() -> None:
    world = World(FULL, config())
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    busy = world.cache.open(B)
    assert busy is not None
    assert world.cache.extend(busy, 4 * 4)
    before = world.cache.stats()["tiers"]
    assert world.cache.open(A) is None
    assert world.cache.stats()["tiers"]["device"]["tokens"] == before["device"]["tokens"]
    world.cache.close(busy)
    assert world.run(A).cached == CachedTokens(host=12)
    world.close()


def test_load_never_uses_the_device_tier_only() -> None:
    world = World(FULL, config(load=LoadPolicy.NEVER, device_pages=(16,)))
    world.run(A)
    assert world.run(A).cached == CachedTokens(device=12)
    world.cache.flush(Tier.DEVICE)
    assert world.run(A).cached.total == 0
    world.close()


@pytest.mark.parametrize(("bytes_a_second", "cached"), [(1e12, 12), (1.0, 0)])
def test_auto_loads_where_that_takes_less_time_than_computing(bytes_a_second: float, cached: int) -> None:
    world = World(FULL, config(load=LoadPolicy.AUTO, device_pages=(16,)))
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    world.cache.note_prefill(1000, 1.0)
    world.cache.rates.host.note(bytes_a_second, 1.0)
    assert world.run(A).cached == CachedTokens(host=cached)
    assert world.cache.stats()["loads_declined_tokens"] == 12 - cached
    world.close()


@pytest.mark.parametrize("spec", [FULL, HYBRID, LATENT])
def test_a_restarted_server_hits_the_disk_with_its_first_request(spec: KVSpec, tmp_path: Path) -> None:
    settings = {
        "device_pages": (16,) * len(spec.groups),
        "host_bytes": 64 * spec.page_bytes(0),
        "host_sequence_tokens": 16,
    }
    first = World(spec, disk_config(tmp_path, **settings))
    first.run(A)
    first.close()
    second = World(spec, disk_config(tmp_path, **settings))
    assert second.run(A).cached == CachedTokens(disk=12)
    # It came through the host tier and stayed there.
    second.cache.flush(Tier.DEVICE)
    assert second.run(A).cached == CachedTokens(host=12)
    second.close()


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_the_disk_serves_a_device_without_a_host_tier(policy: WritePolicy, tmp_path: Path) -> None:
    world = World(FULL, disk_config(tmp_path, write_policy=policy, staging_pages=8))
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    world.cache.check()
    assert world.run(A).cached == CachedTokens(disk=12)
    assert world.cache.pools.host[0].num_used == 0
    world.close()


def test_write_back_takes_pages_from_the_host_to_the_disk_when_the_host_is_full(tmp_path: Path) -> None:
    settings = {"device_pages": (8,), "host_bytes": 8 * FULL.page_bytes(0), "write_policy": WritePolicy.WRITE_BACK}
    world = World(FULL, disk_config(tmp_path, **settings))
    for start in range(0, 1000, 100):
        world.run(tokens(*range(start, start + 13)))
    assert world.run(tokens(*range(13))).cached == CachedTokens(disk=12)
    world.close()


def test_a_page_that_fell_out_of_the_host_is_found_on_disk_in_the_middle_of_a_prefix(tmp_path: Path) -> None:
    world = World(FULL, disk_config(tmp_path, host_bytes=8 * FULL.page_bytes(0), device_pages=(16,)))
    prompt = tokens(*range(25))
    world.run(prompt)
    world.run(A + 1000)
    world.cache.flush(Tier.DEVICE)
    # Three pages were needed where two were free: the deepest page of the older sequence went.
    assert world.run(prompt).cached == CachedTokens(host=20, disk=4)
    world.close()


def test_another_models_pages_are_never_found(tmp_path: Path) -> None:
    one = World(FULL, disk_config(tmp_path, fingerprint="one"))
    one.run(A)
    one.close()
    two = World(FULL, disk_config(tmp_path, fingerprint="two"))
    assert two.run(A).cached.total == 0
    assert two.store is not None
    assert two.store.state()["other_models_bytes"] > 0
    two.close()
    again = World(FULL, disk_config(tmp_path, fingerprint="one"))
    assert again.run(A).cached.total == 12
    again.close()


def test_a_window_group_stores_what_can_be_read_after_prompt_and_sequence() -> None:
    settings = {"device_pages": (32, 32), "host_bytes": 64 * HYBRID.page_bytes(0), "host_sequence_tokens": 16}
    world = World(HYBRID, tier_config(**settings))  # type: ignore[arg-type]
    world.run(tokens(*range(40)))
    used = [pool.num_used for pool in world.cache.pools.host]
    # The next turn starts at 40 and reads 35 .. 39: pages 8 and 9. The same prompt again starts at 36 and reads 31 ..
    # 35: pages 7 and 8. Of the full group all ten are needed.
    assert used == [10, 3]
    world.cache.flush(Tier.DEVICE)
    assert world.run(tokens(*range(41))).cached == CachedTokens(host=40)
    world.close()


def test_the_tiers_work_on_threads_of_their_own(tmp_path: Path) -> None:
    settings = {"host_bytes": 64 * FULL.page_bytes(0), "device_pages": (16,)}
    world = World(FULL, disk_config(tmp_path, **settings), threaded=True)
    prompts = [np.arange(start, start + 13, dtype=np.int32) for start in range(0, 2000, 100)]
    for _ in range(3):
        for prompt in prompts:
            world.run(prompt)
    stats = world.cache.stats()
    assert stats["hit_tokens"]["host"] + stats["hit_tokens"]["disk"] == 2 * 20 * 12
    world.close()
