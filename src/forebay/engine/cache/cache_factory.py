"""Builds the cache: all tiers on rank 0; on other ranks the transfers that follow its decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from forebay.engine.cache.actions import Backup, Done, LoadBack
from forebay.engine.cache.config import TierConfig
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.host.pool_check import require_host_pool
from forebay.engine.cache.host.region import HostRegion, Progress
from forebay.engine.cache.interface import DeviceBuffers
from forebay.engine.cache.prefix_cache import PrefixCache, host_page_counts
from forebay.engine.cache.transfer.bandwidth import measure_disk, measure_host
from forebay.engine.cache.transfer.copier import CopyRuns, PageCopier
from forebay.engine.cache.transfer.executor import DiskThreads, RankExecutor
from forebay.engine.cache.transfer.rank_transfers import RankTransfers
from forebay.kv.spec import KVSpec

__all__ = ["build_cache", "follow_cache"]


def build_cache(
    spec: KVSpec,
    config: TierConfig,
    buffers: DeviceBuffers,
    *,
    copy_runs: CopyRuns | None = None,
    progress: Progress | None = None,
    broadcast: Callable[[Backup | LoadBack], None] | None = None,
    collect: Callable[[], Iterable[tuple[int, Done]]] = tuple,
    before: Callable[[str], None] = lambda point: None,
) -> PrefixCache:
    """Rank 0's cache with the tiers that ``config`` asks for; ``PrefixCache.close_tiers`` closes them.

    Args:
        spec: what a page is.
        config: sizes and policies.
        buffers: rank 0's device pool.
        copy_runs: the native library's copy (``copier.native_copy_runs``); None: numpy's, about half as fast.
        progress: called while the host pool is allocated.
        broadcast: sends records to the other ranks, in order (needed with more than one).
        collect: (rank, result) for each report that has arrived from another rank; must not block.
        before: called before bytes are moved (for tests that inject faults, see rank_transfers.py and store.py).

    Raises:
        UsageError: settings that cannot work, or a disk tier's folder that cannot be used.
        RefusedError: the host tier does not fit, or the disk tier's folder is in use.
    """
    config.validate(spec)
    settings = config.settings
    if not settings.host_bytes and settings.disk_dir is None:
        return PrefixCache(spec, config)
    if settings.host_bytes:
        require_host_pool(settings.host_bytes, config.host_reserve_bytes)
    with ExitStack() as undo:
        region = HostRegion.create(host_page_counts(spec, config), _page_bytes(spec))
        undo.callback(region.close)
        region.fault_in(progress)
        store = open_store(spec, config, before)
        if store is not None:
            undo.callback(store.close)
        local = _transfers(spec, config, 0, buffers, region, copy_runs, before)
        disk = DiskThreads(store, region) if store is not None else None
        executor = RankExecutor(local, region, disk, ranks=config.tp, broadcast=broadcast, collect=collect)
        cache = PrefixCache(spec, config, executor, store)
        cache.rates.host.initial = measure_host(region)
        if store is not None:
            cache.rates.disk.initial = measure_disk(store.folder)
        undo.pop_all()
    cache.executor, cache.region = executor, region

    def close() -> None:
        # A hung transfer may still write to the region: then it stays mapped until the process ends.
        if executor.close():
            region.close()

    cache.resources.callback(close)
    return cache


def follow_cache(
    spec: KVSpec,
    config: TierConfig,
    rank: int,
    buffers: DeviceBuffers,
    region_path: str,
    *,
    copy_runs: CopyRuns | None = None,
    before: Callable[[str], None] = lambda point: None,
) -> RankTransfers:
    """Another rank's transfers. Submit each record that rank 0 broadcasts, and send back what ``take_done`` returns.

    ``region_path`` is rank 0's ``cache.region.path``.
    """
    region = HostRegion.attach(region_path, host_page_counts(spec, config), _page_bytes(spec))
    return _transfers(spec, config, rank, buffers, region, copy_runs, before)


def open_store(spec: KVSpec, config: TierConfig, before: Callable[[str], None]) -> DiskStore | None:
    """The disk tier's files, if there is a disk tier."""
    settings = config.settings
    if settings.disk_dir is None:
        return None
    return DiskStore(
        Path(settings.disk_dir),
        settings.disk_bytes,
        spec,
        config.fingerprint,
        segment_bytes=config.segment_bytes,
        fsync=config.fsync,
        before=before,
    )


def _page_bytes(spec: KVSpec) -> list[int]:
    return [spec.page_bytes(group) for group in range(len(spec.groups))]


def _transfers(
    spec: KVSpec,
    config: TierConfig,
    rank: int,
    buffers: DeviceBuffers,
    region: HostRegion,
    copy_runs: CopyRuns | None,
    before: Callable[[str], None],
) -> RankTransfers:
    copier = PageCopier(spec, rank, config.tp, buffers, region, copy_runs)
    num_layers = 1 + max(layer for group in spec.groups for layer in group.layers)
    return RankTransfers(copier, num_layers, region.read_status, before=before)
