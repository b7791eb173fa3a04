"""What the cache says of itself adds up, and never says a token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cache_world import FULL, World, disk_config, tier_config, tokens

from forebay.engine.cache.accounting import Rate
from forebay.engine.cache.cache_factory import build_cache
from forebay.engine.cache.interface import Tier
from forebay.errors import RefusedError, UsageError

A = tokens(*range(13))
B = tokens(*range(8), 100, 101, 102, 103, 104)


def test_tokens_by_state_add_up_to_the_pool(tmp_path: Path) -> None:
    world = World(FULL, disk_config(tmp_path, host_bytes=32 * FULL.page_bytes(0)))
    world.run(A)
    lease = world.cache.open(A)
    assert lease is not None
    tiers = world.cache.stats()["tiers"]
    assert tiers["device"]["tokens"] == {"free": 13 * 4, "evictable": 0, "held": 12}
    world.cache.close(lease)
    tiers = world.cache.stats()["tiers"]
    assert tiers["device"]["tokens"] == {"free": 13 * 4, "evictable": 12, "held": 0}
    assert tiers["host"]["tokens"] == {"free": 29 * 4, "evictable": 12, "held": 0}
    assert tiers["disk"]["tokens"] == {"stored": 12}
    assert sum(tiers["host"]["tokens"].values()) == tiers["host"]["capacity_tokens"]
    assert tiers["device"]["oldest_s"] >= 0
    world.close()


def test_counters_follow_a_page_down_and_up(tmp_path: Path) -> None:
    world = World(FULL, disk_config(tmp_path, host_bytes=32 * FULL.page_bytes(0)))
    world.cache.note_prefill(100, 1.0)
    world.run(A)
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    world.cache.flush(Tier.HOST)
    world.cache.rates.disk.note(1e12, 1.0)
    world.run(A)
    stats = world.cache.stats()
    assert stats["hit_tokens"] == {"device": 12, "host": 12, "disk": 12}
    assert (stats["requests"], stats["requests_with_hit"]) == (4, 3)
    page = FULL.page_bytes(0)
    assert stats["bytes"] == dict.fromkeys(
        ("device_host", "host_disk", "host_device", "disk_host", "disk_device"), 3 * page
    )
    assert stats["prefill_saved_s"] == pytest.approx(0.36)
    assert stats["drops"] == {}
    world.close()


def test_the_snapshot_names_the_hottest_prefixes_by_length_only() -> None:
    world = World(FULL, tier_config(device_pages=(32,), host_bytes=32 * FULL.page_bytes(0)))
    for prompt in (A, A, A, B):
        world.run(prompt)
    snapshot = world.cache.snapshot()
    assert snapshot["tree"] == {"pages": 4, "tokens": 16}
    shared, first, second = snapshot["hottest_prefixes"]
    assert shared == {"tokens": 8, "uses": 4, "device_tokens": 8, "host_tokens": 8}
    assert (first["tokens"], first["uses"]) == (12, 3)
    assert (second["tokens"], second["uses"]) == (12, 1)
    assert "103" not in json.dumps(snapshot["hottest_prefixes"])
    json.dumps(snapshot)
    world.close()


def test_a_snapshot_of_a_large_tree_looks_at_a_part_of_it() -> None:
    world = World(FULL, tier_config(device_pages=(4000,)))
    rng = np.random.default_rng(0)
    for _ in range(300):
        world.run(rng.integers(0, 9999, 13, dtype=np.int32))
    for _ in range(2):
        world.run(A)
    hottest = world.cache.snapshot(prefixes=3)["hottest_prefixes"]
    assert hottest[0] == {"tokens": 12, "uses": 2, "device_tokens": 12, "host_tokens": 0}
    assert len(hottest) == 3
    world.close()


def test_a_rate_forgets() -> None:
    rate = Rate(initial=5.0)
    assert rate.value == 5.0
    rate.note(100, 1.0)
    assert rate.value == 100.0
    for _ in range(20):
        rate.note(10, 1.0)
    assert rate.value == pytest.approx(10.0, rel=0.05)


def test_settings_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    for settings, word in (
        ({"device_pages": (0,)}, "device pool"),
        ({"device_pages": (4, 4)}, "device pool"),
        ({"device_pages": (4,), "disk_dir": str(tmp_path)}, "--disk-size"),
        ({"device_pages": (4,), "disk_dir": str(tmp_path), "disk_bytes": 10**6}, "fingerprint"),
        ({"device_pages": (4,), "tp": 3}, "3 ranks"),
    ):
        with pytest.raises(UsageError) as refusal:
            tier_config(**settings).validate(FULL)  # type: ignore[arg-type]
        assert word in f"{refusal.value.message} {refusal.value.fix}"


def test_a_host_pool_that_does_not_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = disk_config(tmp_path / "disk", host_bytes=2**50)
    with pytest.raises(RefusedError, match="largest that fits"):
        build_cache(FULL, config, None)  # type: ignore[arg-type]
    assert not (tmp_path / "disk").exists()
