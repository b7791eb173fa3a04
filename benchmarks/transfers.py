"""Transfers against what memory and disk can do: device <-> host against memcpy, disk against a plain sequential read.

    python -m benchmarks.transfers [--dir FOLDER] [--pages 256] [--json out.json]

Everything is timed in turns, call by call, and the best call counts: on a shared machine the best is what the code can
do, and the ratio is what to read. Pages are SmolLM2-135M's (30 layers, 3 KV heads of 64, bf16, 16 tokens: 368,640
bytes). Scattered pages are the usual case, consecutive ones the best. The disk is read past the page cache
(posix_fadvise); the plain read is of the same segment file, front to back, in 1 MiB reads into memory of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from forebay.engine.cache.actions import DiskPage, PageMapping
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.host.region import HostRegion
from forebay.engine.cache.transfer.copier import CopyRuns, PageCopier, native_copy_runs
from forebay.kv.spec import KVSpec, LayerGroup, Part

SPEC = KVSpec((LayerGroup("full", tuple(range(30)), (Part("k", 3, 64, 2), Part("v", 3, 64, 2))),), page_size=16)
PAGE_BYTES = SPEC.page_bytes(0)


class Device:
    """A device pool in plain memory."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._arrays = [[aligned(pages * self.page_stride(0, part)) for part in range(2)] for _ in range(30)]

    def num_pages(self, group: int) -> int:
        return self._pages

    def address(self, group: int, layer_index: int, part: int) -> int:
        return int(self._arrays[layer_index][part].ctypes.data)

    def page_stride(self, group: int, part: int) -> int:
        return PAGE_BYTES // 60


def aligned(nbytes: int) -> np.ndarray:
    """Memory that starts on a cache line, as torch's does."""
    memory = np.ones(nbytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:nbytes]


def best_rates(calls: dict[str, Callable[[], None]], nbytes: int, seconds: float) -> dict[str, float]:
    """Best GB/s of each call, taking turns."""
    best = dict.fromkeys(calls, float("inf"))
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: nbytes / took / 1e9 for name, took in best.items()}


def native() -> CopyRuns | None:
    """The native library's copy, if there is a compiler (or a library already built)."""
    try:
        from forebay.engine.kernels.library import best_copy, load_library
        from forebay.engine.kernels.native.build import build_library

        path = build_library()
        return None if path is None else native_copy_runs(best_copy(load_library(path)))
    except (ImportError, OSError):
        return None


def memory(pages: int, seconds: float) -> dict[str, float]:
    """GB/s between device and host, with either way of copying, and memcpy's for the same bytes."""
    device, region = Device(4 * pages), HostRegion.create([4 * pages], [PAGE_BYTES])
    region.fault_in()
    rng = np.random.default_rng(0)
    scattered = PageMapping(
        0, tuple(rng.permutation(4 * pages)[:pages].tolist()), tuple(rng.permutation(4 * pages)[:pages].tolist())
    )
    in_a_row = PageMapping(0, tuple(range(pages)), tuple(range(pages)))
    source, target = np.ones(pages * PAGE_BYTES, np.uint8), np.ones(pages * PAGE_BYTES, np.uint8)
    calls: dict[str, Callable[[], None]] = {"memcpy": lambda: np.copyto(target, source)}
    for way, copy_runs in (("native", native()), ("numpy", None)):
        if way == "native" and copy_runs is None:
            continue
        copier = PageCopier(SPEC, 0, 1, device, region, copy_runs)
        for place, mapping in (("scattered", scattered), ("in_a_row", in_a_row)):
            calls[f"{way}_backup_{place}"] = lambda c=copier, p=mapping: c.back_up(p)  # type: ignore[misc]
            calls[f"{way}_load_{place}"] = lambda c=copier, p=mapping: [c.load_layer(p, layer) for layer in range(30)]  # type: ignore[misc]
    return best_rates(calls, pages * PAGE_BYTES, seconds)


def disk(folder: Path, pages: int, seconds: float) -> dict[str, float]:
    """GB/s from disk through the store, checksums and all, and of a plain read of the same file."""
    store = DiskStore(folder, 16 * pages * PAGE_BYTES, SPEC, "benchmark", segment_bytes=2 * pages * PAGE_BYTES)
    data = np.random.default_rng(0).integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8)
    wanted = [DiskPage(0, i.to_bytes(16, "little"), bytes(64), i) for i in range(pages)]
    began = time.perf_counter()
    assert store.write(wanted, [memoryview(page) for page in data]) == []
    write_s = time.perf_counter() - began
    (path,) = folder.glob("segment-*.kv")
    descriptor = os.open(path, os.O_RDONLY)
    os.fdatasync(descriptor)
    target = np.empty_like(data)
    memory_of_its_own = memoryview(np.empty(path.stat().st_size, np.uint8))

    def plain() -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        offset = 0
        while count := os.preadv(descriptor, [memory_of_its_own[offset : offset + 2**20]], offset):
            offset += count

    def through_store() -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert store.read(wanted, [memoryview(page) for page in target]) == []

    rates = best_rates({"plain_read": plain, "store_read": through_store}, pages * PAGE_BYTES, seconds)
    assert (target == data).all(), "other bytes came back"
    os.close(descriptor)
    store.close()
    return {**rates, "store_write": pages * PAGE_BYTES / write_s / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json")
    args = parser.parse_args()
    rates = memory(args.pages, args.seconds)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        from_disk = disk(Path(folder), args.pages, args.seconds)
    report = {
        "bytes": args.pages * PAGE_BYTES,
        "memory_gb_per_s": rates,
        "over_memcpy": {name: rate / rates["memcpy"] for name, rate in rates.items() if name != "memcpy"},
        "disk_gb_per_s": from_disk,
        "store_read_over_plain_read": from_disk["store_read"] / from_disk["plain_read"],
    }
    print(json.dumps(report, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
