"""A short look at how fast the tiers are here, so that ``auto`` has numbers before the first load has given real
ones.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from forebay.engine.cache.host.region import HostRegion

__all__ = ["measure_disk", "measure_host"]

_PROBE_BYTES = 16 * 2**20


def measure_host(region: HostRegion) -> float | None:
    """Bytes per second out of the host region: the best of three copies; None: it has no pages."""
    sizes = [pages * size for pages, size in zip(region.page_counts, region.page_bytes)]
    group = max(range(len(sizes)), key=sizes.__getitem__)
    pages = region.pages(group)[: max(1, _PROBE_BYTES // region.page_bytes[group])]
    if not len(pages):
        return None
    target = np.empty_like(pages)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        np.copyto(target, pages)
        best = min(best, time.perf_counter() - started)
    return pages.nbytes / best


def measure_disk(folder: Path) -> float | None:
    """Bytes per second of a sequential read in ``folder``, past the page cache where the file system allows; None: it
    could not be measured."""
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        data = np.random.default_rng(0).bytes(_PROBE_BYTES)
        os.pwrite(descriptor, data, 0)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        count = len(os.pread(descriptor, _PROBE_BYTES, 0))
        return count / (time.perf_counter() - started)
    except OSError:
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
