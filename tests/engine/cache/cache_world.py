"""A device with real bytes, and an executor whose every step the test decides."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.engine.cache.config import CacheConfig, TierConfig
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.host.region import HostRegion
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.prefix_cache import PrefixCache, host_page_counts
from forebay.engine.cache.transfer.copier import PageCopier
from forebay.engine.cache.transfer.executor import DiskThreads, RankExecutor
from forebay.engine.cache.transfer.rank_transfers import RankTransfers
from forebay.kv.spec import KVSpec, LayerGroup, Part

PARTS = (Part("k", 2, 4, 2), Part("v", 2, 4, 2))
FULL = KVSpec((LayerGroup("full", (0, 1, 2), PARTS),), page_size=4)
HYBRID = KVSpec((LayerGroup("full", (1,), PARTS), LayerGroup("sliding", (0, 2), PARTS, window=6)), page_size=4)
LATENT = KVSpec((LayerGroup("latent", (0, 1), (Part("latent", 1, 9, 2),)),), page_size=4)

Int32 = npt.NDArray[np.int32]


def nothing(point: str) -> None:
    """No fault."""


class FakeDevice:
    """One rank's pool as plain arrays (pages, bytes of a page); implements DeviceBuffers."""

    def __init__(self, spec: KVSpec, pages: tuple[int, ...], tp: int = 1) -> None:
        self.spec = spec
        self.pages = pages
        self.tp = tp
        self.arrays = [
            [
                [np.zeros((pages[g], self.page_stride(g, p)), np.uint8) for p in range(len(group.parts))]
                for _ in group.layers
            ]
            for g, group in enumerate(spec.groups)
        ]

    def num_pages(self, group: int) -> int:
        return self.pages[group]

    def address(self, group: int, layer_index: int, part: int) -> int:
        return int(self.arrays[group][layer_index][part].ctypes.data)

    def page_stride(self, group: int, part: int) -> int:
        spec = self.spec.groups[group].parts[part]
        return spec.heads_per_rank(self.tp) * self.spec.page_size * spec.dim * spec.value_bytes

    def write(self, group: int, page: int, content: bytes) -> None:
        """Fill a page with bytes drawn from ``content``, others in each layer and part."""
        for layer, parts in enumerate(self.arrays[group]):
            for part, array in enumerate(parts):
                array[page] = pattern(content, group, layer, part, array.shape[1])

    def holds(self, group: int, page: int, content: bytes) -> bool:
        """True if the page was written with ``content``."""
        return all(
            bool((array[page] == pattern(content, group, layer, part, array.shape[1])).all())
            for layer, parts in enumerate(self.arrays[group])
            for part, array in enumerate(parts)
        )


def pattern(content: bytes, group: int, layer: int, part: int, size: int) -> npt.NDArray[np.uint8]:
    seed = blake2b(content + bytes([group, layer, part]), digest_size=32).digest()
    return np.frombuffer((seed * (size // 32 + 1))[:size], np.uint8)


class ManualExecutor(RankExecutor):
    """Nothing moves until the test says so; waiting makes everything move."""

    def wait(self, timeout_s: float) -> None:
        while self.step():
            pass

    def step(self, thread: int | None = None) -> bool:
        """Carry out one record of one thread (None: of any)."""
        threads = [self.local.backups, self.local.loads]
        if self.disk is not None:
            threads += [self.disk.writes, self.disk.reads, self.local.disk_loads]  # type: ignore[list-item]
        if thread is not None:
            return threads[thread % len(threads)].run_one()
        return any(one.run_one() for one in threads)


class World:
    """A cache with its tiers, one rank, and the device whose bytes say whether a page is what it should be."""

    def __init__(
        self,
        spec: KVSpec,
        config: TierConfig,
        *,
        threaded: bool = False,
        before: Callable[[str], None] = nothing,
        retry_s: float = 0.0,
    ) -> None:
        self.spec = spec
        self.config = config
        self.device = FakeDevice(spec, config.device_pages)
        self.region = HostRegion.create(
            host_page_counts(spec, config), [spec.page_bytes(g) for g in range(len(spec.groups))]
        )
        settings = config.settings
        store = None
        if settings.disk_dir is not None:
            store = DiskStore(
                Path(settings.disk_dir),
                settings.disk_bytes,
                spec,
                config.fingerprint,
                segment_bytes=config.segment_bytes,
                before=before,
                retry_s=retry_s,
            )
        disk = DiskThreads(store, self.region, threaded=threaded) if store is not None else None
        layers = 1 + max(layer for group in spec.groups for layer in group.layers)
        copier = PageCopier(spec, 0, 1, self.device, self.region)
        idle: dict[str, Callable[[], object]] = {}
        if not threaded and disk is not None:
            idle["idle"] = disk.reads.run_one
        local = RankTransfers(copier, layers, self.region.read_status, before=before, threaded=threaded, **idle)  # type: ignore[arg-type]
        kind = RankExecutor if threaded else ManualExecutor
        self.executor = kind(local, self.region, disk)
        self.store = store
        self.cache = PrefixCache(spec, config, self.executor, store)

    def compute(self, lease: CacheLease, sequence: Int32, start: int) -> None:
        """Write what a forward pass over sequence[start:] would: every page that is full then,
        where the lease has it.
        """
        size = self.spec.page_size
        for group in range(len(self.spec.groups)):
            table = lease.page_tables[group]
            for index in range(start // size, len(sequence) // size):
                self.device.write(group, int(table[index]), sequence[: (index + 1) * size].tobytes())

    def verify(self, lease: CacheLease, sequence: Int32) -> None:
        """Every full page that the lease can read holds the bytes of its tokens."""
        size = self.spec.page_size
        for group in range(len(self.spec.groups)):
            table = lease.page_tables[group]
            for index in range(lease.first[group], min(len(lease.nodes), len(sequence) // size)):
                page = int(table[index])
                content = sequence[: (index + 1) * size].tobytes()
                assert self.device.holds(group, page, content), f"page {index} of group {group} has other bytes"

    def wait(self, lease: CacheLease) -> bool:
        """What a step does with layer events: wait for every layer in turn."""
        if lease.layer_events is None:
            return True
        events = lease.layer_events
        if isinstance(self.executor, ManualExecutor):
            self.executor.wait(0)
        return all(events.wait_layer(layer) for layer in range(self.spec.num_layers))

    def run(self, prompt: Int32, new: int = 0) -> CacheLease:
        """One whole request: open, load, compute, commit, close, and all transfers to their end."""
        lease = self.cache.open(prompt)
        assert lease is not None, "no room for the request"
        found = lease.cached.total
        if not self.wait(lease):
            self.cache.process_completions()
            found = self.cache.fail_load(lease)
        self.cache.process_completions()
        self.verify(lease, prompt)
        whole = np.concatenate([prompt, np.arange(9_000, 9_000 + new, dtype=np.int32)])
        assert self.cache.extend(lease, len(whole)), "no room for the request's own pages"
        self.compute(lease, whole, found)
        self.cache.commit(lease, whole)
        self.cache.check()
        self.cache.close(lease)
        self.cache.check()
        self.cache.drain(5.0)
        self.cache.check()
        return lease

    def close(self) -> None:
        """End the threads, close the files."""
        self.executor.close()
        self.region.close()


def tokens(*values: int) -> Int32:
    return np.array(values, dtype=np.int32)


def tier_config(**settings: object) -> TierConfig:
    """A TierConfig from its own fields and the user's settings, side by side."""
    asked = {name: settings.pop(name) for name in CacheConfig.__struct_fields__ if name in settings}
    return TierConfig(settings=CacheConfig(**asked), **settings)  # type: ignore[arg-type]


def disk_config(folder: Path, **settings: object) -> TierConfig:
    """A small cache with a disk tier."""
    defaults: dict[str, object] = {"device_pages": (16,), "disk_bytes": 10**6, "fingerprint": "model"}
    return tier_config(**{**defaults, "disk_dir": str(folder), **settings})
