"""A real, small disk that another process fills and empties: the disk tier gives up segments of its own and goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_tmpfs import Filler, free_bytes, small_tmpfs
from test_disk_store import assert_all_good, chain, open_store, read, segments, write

from forebay.engine.cache.actions import DiskPage
from forebay.engine.cache.disk.segment import open_segment
from forebay.engine.cache.disk.store import DiskStore

DISK = 4 * 2**20
BUDGET = 3 * 2**20
SEGMENT = 256 * 2**10


class Clock:
    """Moved by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", DISK) as folder:
        yield folder


@pytest.fixture
def filler(disk: Path) -> Iterator[Filler]:
    filler = Filler(disk)
    yield filler
    filler.close()


def full_tier(folder: Path, clock: Clock) -> DiskStore:
    """A tier that has used most of its budget."""
    store = open_store(folder / "kv", budget=BUDGET, segment_bytes=SEGMENT, retry_s=5.0, clock=clock)
    for seed in range(80):
        assert write(store, chain(32, seed)) == []
    assert BUDGET - 2 * SEGMENT < store.used_bytes <= BUDGET
    return store


def stored(store: DiskStore, seeds: range) -> list[tuple[DiskPage, bytes]]:
    return [entry for seed in seeds for entry in chain(32, seed) if store.has(0, entry[0].key)]


def test_a_disk_that_others_fill_costs_old_segments_and_no_new_page(disk: Path, filler: Filler) -> None:
    clock = Clock()
    store = full_tier(disk, clock)
    filler.fill()
    assert free_bytes(disk) == 0
    for seed in range(100, 150):
        assert write(store, chain(32, seed)) == [], "a page was dropped although segments could be given up"
        assert_all_good(store, chain(32, seed))
    assert store.paused == ""
    assert store.counts["segments_given_up"] >= 1
    store.check()
    assert_all_good(store, stored(store, range(150)))
    # What it holds is what the others left it, and it grows again when they are gone.
    assert store.used_bytes <= BUDGET
    filler.empty()
    for seed in range(200, 280):
        assert write(store, chain(32, seed)) == []
    assert store.used_bytes > BUDGET - 2 * SEGMENT
    store.close()
    again = open_store(disk / "kv", budget=BUDGET, segment_bytes=SEGMENT)
    assert_all_good(again, chain(32, 279))
    again.close()


def test_others_that_take_whatever_becomes_free_make_it_pause_and_it_goes_on_after_them(disk: Path) -> None:
    clock = Clock()
    full = False

    def before(point: str) -> None:
        if full and point == "disk_write":
            raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store(disk / "kv", budget=BUDGET, segment_bytes=SEGMENT, retry_s=5.0, clock=clock, before=before)
    for seed in range(40):
        write(store, chain(32, seed))
    held = len(segments(disk / "kv"))
    full = True
    assert write(store, chain(8, 300)) == [(i, "disk_full") for i in range(8)]
    assert store.state()["state"].startswith("paused: disk_full")
    given_up = held - len(segments(disk / "kv"))
    assert 1 <= given_up <= 3, "one write that cannot succeed cost more than what it needed twice over"
    assert write(store, chain(8, 300)) == [(i, "disk_paused") for i in range(8)]
    assert len(segments(disk / "kv")) == held - given_up, "a paused tier gave up more"
    clock.now += 5.1
    full = False
    assert write(store, chain(8, 300)) == []
    assert_all_good(store, chain(8, 300))
    store.check()
    store.close()


def test_a_write_that_the_disk_cuts_short_leaves_whole_records_only(disk: Path, filler: Filler) -> None:
    """A nearly full disk takes the first bytes of a write and then no more."""
    store = open_store(disk / "kv", budget=BUDGET, segment_bytes=2 * 2**20, clock=Clock(), retry_s=5.0)
    assert write(store, chain(3)) == []
    spare = disk / "spare"
    spare.write_bytes(b"x" * 40_000)
    filler.fill()
    spare.unlink()
    assert write(store, chain(64, 1)) == [(i, "disk_full") for i in range(64)]
    (path,) = segments(disk / "kv")
    os.close(store._lock_file)
    found = open_segment(path, store.namespace, store.shapes)
    assert found is not None
    assert len(found.entries) == 3, "half a record was left behind"
    assert_all_good(store, chain(3))
    store.check()


def test_a_tier_of_one_segment_replaces_it_rather_than_stay_paused(disk: Path, filler: Filler) -> None:
    clock = Clock()
    store = open_store(disk / "kv", budget=BUDGET, segment_bytes=SEGMENT, retry_s=5.0, clock=clock)
    assert write(store, chain(64)) == []
    filler.fill()
    assert write(store, chain(64, 1)), "there was room after all"
    assert_all_good(store, chain(64))
    clock.now += 5.1
    assert write(store, chain(64, 1)) == []
    assert_all_good(store, chain(64, 1))
    assert not stored(store, range(1))
    store.check()
    store.close()


def test_a_server_starts_on_a_full_disk_with_the_pages_it_has(disk: Path, filler: Filler) -> None:
    """Neither the lock's pid nor a missing index can be written; no page is lost for that."""
    script = """
        import os, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_disk_store import *
        write(open_store(Path(sys.argv[1]) / "kv"), chain(40))
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(disk), str(Path(__file__).parent)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -9
    filler.fill()
    again = open_store(disk / "kv", budget=BUDGET, segment_bytes=SEGMENT, retry_s=0.0)
    assert_all_good(again, chain(40))
    assert write(again, chain(40, 1)) == []
    assert_all_good(again, chain(40, 1))
    again.close()


def test_filled_and_emptied_at_any_moment_no_wrong_page_is_read(disk: Path, filler: Filler) -> None:
    clock = Clock()
    store = full_tier(disk, clock)
    dropped = 0
    for seed in range(500, 560):
        if seed % 7 == 0:
            filler.fill()
        elif seed % 7 == 4:
            filler.empty()
        dropped += len(write(store, chain(32, seed)))
        clock.now += 1.0
        present = stored(store, range(seed - 3, seed + 1))
        bad, data = read(store, present)
        assert bad == []
        assert data == [payload for _, payload in present]
        store.check()
        total = sum(path.stat().st_size for path in segments(disk / "kv"))
        assert total == store.used_bytes
    assert dropped == 0
    store.close()
