"""How a step waits for pages: layer by layer, no longer than it is allowed to, and not at all after a failure."""

from __future__ import annotations

import threading
from pathlib import Path

from cache_world import FULL, World, disk_config, tier_config, tokens

from forebay.engine.cache.interface import Tier
from forebay.engine.cache.transfer.layer_events import LayerDoneCounter, LoadEvents

A = tokens(*range(13))


def test_the_first_layer_can_be_used_while_the_last_is_still_coming() -> None:
    go_on = threading.Event()
    layers_begun = 0

    def before(point: str) -> None:
        nonlocal layers_begun
        if point == "load_layer":
            layers_begun += 1
            if layers_begun == 3:
                assert go_on.wait(30)

    config = tier_config(device_pages=(16,), host_bytes=32 * FULL.page_bytes(0))
    world = World(FULL, config, threaded=True, before=before)
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    lease = world.cache.open(A)
    assert lease is not None
    assert lease.layer_events.wait_layer(0)
    assert lease.layer_events.wait_layer(1)
    world.cache.process_completions()
    assert lease.layer_events is not None, "the load was over before its last layer"
    go_on.set()
    assert lease.layer_events.wait_layer(2)
    world.verify(lease, A)
    world.cache.close(lease)
    world.close()


def test_a_load_that_is_too_slow_is_recomputed_and_its_pages_stay_untouchable_until_it_ends() -> None:
    go_on = threading.Event()
    config = tier_config(device_pages=(16,), host_bytes=32 * FULL.page_bytes(0), load_timeout_s=0.05)
    world = World(
        FULL, config, threaded=True, before=lambda point: None if point != "load" else (go_on.wait(30), None)[1]
    )
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    lease = world.cache.open(A)
    assert lease is not None
    assert not lease.layer_events.wait_layer(0)
    assert world.cache.fail_load(lease) == 0
    assert lease.cached.total == 0
    assert world.cache.extend(lease, 13)
    world.compute(lease, A, 0)
    world.cache.commit(lease, A)
    world.cache.check()
    assert len(world.cache.load_back.loads) == 1
    go_on.set()
    assert world.cache.drain(30)
    world.verify(lease, A)
    world.cache.close(lease)
    world.cache.check()
    assert world.run(A).cached.device == 12
    world.close()


def test_layer_events_add_up_the_waiting_over_all_layers() -> None:
    slow = LayerDoneCounter()
    slow.advance(2)
    events = LoadEvents((1,), [slow], timeout_s=0.01)
    assert events.wait_layer(0)
    assert events.wait_layer(1)
    assert not events.wait_layer(2)
    # It has failed for good, also for layers that are there.
    assert not events.wait_layer(0)
    assert events.waited_s > 0


def test_a_bad_page_on_disk_is_recomputed_and_counted(tmp_path: Path) -> None:
    config = disk_config(tmp_path, host_bytes=32 * FULL.page_bytes(0))
    first = World(FULL, config)
    first.run(A)
    first.close()
    (path,) = tmp_path.glob("segment-*.kv")
    data = bytearray(path.read_bytes())
    # In the payload of the second record.
    data[64 + 2 * (len(data) - 64) // 4] ^= 16
    path.write_bytes(data)
    second = World(FULL, config)
    lease = second.run(A)
    assert lease.cached.total == 0
    stats = second.cache.stats()
    assert stats["drops"]["disk_checksum"] == 1
    assert stats["loads_failed"] == 1
    # What was good has reached the host, what was bad has been written anew.
    assert second.run(A).cached.total == 12
    second.close()
    third = World(FULL, config)
    assert third.run(A).cached.disk == 12
    third.close()


def test_failed_transfers_cost_time_and_never_a_page() -> None:
    faults = {"backup": 1, "load": 1}

    def before(point: str) -> None:
        if faults.get(point):
            faults[point] -= 1
            raise OSError("injected")

    config = tier_config(device_pages=(16,), host_bytes=32 * FULL.page_bytes(0))
    world = World(FULL, config, before=before)
    world.run(A)
    assert world.cache.stats()["drops"] == {"backup_failed": 3}
    world.run(A)
    world.cache.flush(Tier.DEVICE)
    assert world.run(A).cached.total == 0
    assert world.cache.stats()["drops"] == {"backup_failed": 3, "load_failed": 3}
    world.cache.flush(Tier.DEVICE)
    assert world.run(A).cached.host == 12
    world.close()
