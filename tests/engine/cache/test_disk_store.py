"""The disk tier's files: what survives a kill at any byte, and what happens to bytes that are not what was written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.engine.cache.actions import DiskPage
from forebay.engine.cache.config import FsyncPolicy
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.radix.page_hash import chain_digest, namespace_digest
from forebay.errors import RefusedError
from forebay.kv.spec import KVSpec, LayerGroup, Part

SPEC = KVSpec((LayerGroup("full", (0, 1, 2), (Part("k", 1, 32, 2), Part("v", 1, 32, 2))),), page_size=4)
PAGE = SPEC.page_bytes(0)


def open_store(folder: Path, **options: object) -> DiskStore:
    defaults: dict[str, object] = {"budget": 10**6, "fingerprint": "model", "spec": SPEC, "retry_s": 0.0}
    return DiskStore(folder, **{**defaults, **options})  # type: ignore[arg-type]


def chain(count: int, seed: int = 0) -> list[tuple[DiskPage, bytes]]:
    """``count`` pages of one sequence with their bytes."""
    digest = namespace_digest("model", SPEC)
    pages = []
    for index in range(count):
        tokens = np.full(4, 1000 * seed + index, dtype=np.int32).tobytes()
        digest = chain_digest(digest, tokens)
        payload = np.random.default_rng([seed, index]).bytes(PAGE)
        pages.append((DiskPage(0, digest, tokens, index), payload))
    return pages


def write(store: DiskStore, pages: list[tuple[DiskPage, bytes]]) -> list[tuple[int, str]]:
    return store.write([page for page, _ in pages], [memoryview(data) for _, data in pages])


def read(store: DiskStore, pages: list[tuple[DiskPage, bytes]]) -> tuple[list[tuple[int, str]], list[bytes]]:
    """(bad pages, bytes read)"""
    targets = [bytearray(PAGE) for _ in pages]
    bad = store.read([page for page, _ in pages], [memoryview(t) for t in targets])
    return bad, [bytes(t) for t in targets]


def assert_all_good(store: DiskStore, pages: list[tuple[DiskPage, bytes]]) -> None:
    bad, data = read(store, pages)
    assert bad == []
    assert data == [payload for _, payload in pages]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kv"))


def test_pages_come_back_as_they_were_written_also_after_a_restart(tmp_path: Path) -> None:
    pages = chain(20)
    store = open_store(tmp_path)
    assert write(store, pages) == []
    assert_all_good(store, pages)
    store.close()
    again = open_store(tmp_path)
    assert_all_good(again, pages)
    again.close()


def test_a_page_is_written_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, chain(5))
    size = store.used_bytes
    write(store, chain(5))
    assert store.used_bytes == size
    store.close()


def test_a_second_server_is_refused_with_the_firsts_pid(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(RefusedError, match=f"pid {os.getpid()}"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=st.floats(0, 1), sealed=st.booleans())
def test_a_file_cut_anywhere_loses_the_pages_behind_the_cut_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, cut: float, sealed: bool
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    pages = chain(8)
    store = open_store(folder)
    write(store, pages)
    if sealed:
        store.close()
    else:
        os.close(store._lock_file)
    (path,) = segments(folder)
    size = int(cut * path.stat().st_size)
    os.truncate(path, size)
    again = open_store(folder)
    record = again.shapes[0].record_bytes
    whole = min(8, max(0, (size - 64) // record))
    assert [again.has(0, page.key) for page, _ in pages] == [i < whole for i in range(8)]
    if whole:
        assert_all_good(again, pages[:whole])
    # It goes on from there.
    assert write(again, pages) == []
    assert_all_good(again, pages)
    again.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), restart=st.booleans())
def test_a_flipped_bit_never_reaches_anybody(
    tmp_path_factory: pytest.TempPathFactory, position: float, bit: int, restart: bool
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    pages = chain(6)
    store = open_store(folder)
    write(store, pages)
    if restart:
        store.close()
    (path,) = segments(folder)
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    with path.open("r+b") as file:
        file.write(data)
    if restart:
        store = open_store(folder)
    present = [entry for entry in pages if store.has(0, entry[0].key)]
    bad, got = read(store, present)
    assert len(bad) <= 1, "one bit spoiled more than one page"
    for i, (page, payload) in enumerate(present):
        if i in dict(bad):
            assert not store.has(0, page.key), "a bad page stayed in the index"
        else:
            assert got[i] == payload, "wrong bytes were handed out"
    if bad:
        assert bad[0][1] == "disk_checksum"
        assert store.counts["disk_checksum"] == 1
    store.close()


def test_a_record_for_other_tokens_is_not_believed(tmp_path: Path) -> None:
    """Two prefixes with one address: the record says whose page it is."""
    store = open_store(tmp_path)
    ((page, payload),) = chain(1)
    write(store, [(page, payload)])
    other = DiskPage(0, page.key, b"\1" * 16, 0)
    bad, _ = read(store, [(other, payload)])
    assert bad == [(0, "disk_checksum")]
    store.close()


def test_a_deleted_file_costs_its_pages_and_the_tier_goes_on(tmp_path: Path) -> None:
    pages = chain(30)
    store = open_store(tmp_path, segment_bytes=10 * 2048)
    write(store, pages)
    store.close()
    store = open_store(tmp_path, segment_bytes=10 * 2048)
    first, *others = segments(tmp_path)
    assert others
    first.unlink()
    bad, data = read(store, pages)
    assert bad
    assert {why for _, why in bad} <= {"disk_file_deleted", "disk_gone"}
    lost = {i for i, _ in bad}
    assert all(data[i] == pages[i][1] for i in range(30) if i not in lost)
    assert len(lost) < 30
    store.check()
    assert write(store, pages) == []
    assert_all_good(store, pages)
    store.close()


def test_a_full_disk_pauses_the_tier_says_so_and_goes_on_later(tmp_path: Path) -> None:
    fail = True

    def before(point: str) -> None:
        if fail and point == "disk_write":
            raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store(tmp_path, before=before, retry_s=0.05)
    pages = chain(4)
    assert write(store, pages) == [(i, "disk_full") for i in range(4)]
    assert store.paused.startswith("disk_full")
    assert store.state()["state"].startswith("paused: disk_full")
    assert write(store, pages) == [(i, "disk_paused") for i in range(4)]
    fail = False
    while store.paused:
        time.sleep(0.01)
    assert write(store, pages) == []
    assert_all_good(store, pages)
    store.close()


def test_segments_are_no_larger_than_a_process_may_write_to_one_file(tmp_path: Path) -> None:
    script = """
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_disk_store import *
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 + 5 * 2048, resource.RLIM_INFINITY))
        store = open_store(Path(sys.argv[1]), retry_s=60)
        print(len(write(store, chain(20))), max(path.stat().st_size for path in segments(Path(sys.argv[1]))))
    """
    bad, largest = run_python(script, tmp_path).split()
    assert bad == "0"
    assert int(largest) <= 64 + 5 * 2048
    store = open_store(tmp_path)
    assert_all_good(store, chain(20))
    store.close()


def test_a_read_error_costs_the_page(tmp_path: Path) -> None:
    fail = False

    def before(point: str) -> None:
        if fail and point == "disk_read":
            raise OSError(errno.EIO, "Input/output error")

    store = open_store(tmp_path, before=before)
    pages = chain(3)
    write(store, pages)
    fail = True
    assert read(store, pages)[0] == [(i, "disk_read_error") for i in range(3)]
    fail = False
    assert not any(store.has(0, page.key) for page, _ in pages)
    store.close()


def test_the_budget_is_kept_by_dropping_the_segment_hit_longest_ago(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget=16 * 2048, segment_bytes=4 * 2048)
    sequences = [chain(2, seed=i) for i in range(12)]
    for i, pages in enumerate(sequences):
        write(store, pages)
        if i < 8:
            assert_all_good(store, sequences[0])
    assert store.used_bytes <= 16 * 2048
    assert store.counts["segments_evicted"] > 0
    kept = [store.has(0, pages[0][0].key) for pages in sequences]
    assert kept[-1]
    assert kept[0], "a segment in use went before one that nobody asked for"
    assert not all(kept)
    store.check()
    store.close()


def test_every_fsync_policy_writes_the_same_bytes(tmp_path: Path) -> None:
    contents = set()
    for policy in FsyncPolicy:
        folder = tmp_path / policy.value
        store = open_store(folder, fsync=policy)
        write(store, chain(5))
        store.close()
        contents.add(b"".join(path.read_bytes() for path in segments(folder)))
    assert len(contents) == 1


def test_a_writer_killed_at_any_moment_leaves_a_folder_that_works(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_disk_store import *
        store = open_store(Path(sys.argv[1]), segment_bytes=16 * 2048)
        print("ready", flush=True)
        for seed in range(10**6):
            write(store, chain(8, seed=seed))
            print(seed, flush=True)
    """
    rng = np.random.default_rng(0)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(float(rng.uniform(0.0, 0.15)))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.stdout.read().split("\n")[:-1] if line.strip()]
        process.wait()
        store = open_store(tmp_path, segment_bytes=16 * 2048)
        store.check()
        for seed in said[-3:]:
            # What was said to be written is there: a kill is not a power cut.
            assert_all_good(store, chain(8, seed=seed))
        for seed in range(len(said) + 2):
            present = [entry for entry in chain(8, seed=seed) if store.has(0, entry[0].key)]
            if present:
                assert_all_good(store, present)
        store.close()


def run_python(script: str, folder: Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), str(folder), str(Path(__file__).parent)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
