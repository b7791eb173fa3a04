"""The cache as the scheduler uses it: leases over a radix tree of pages.

``PrefixCacheProtocol`` (interface.py) documents the public methods. This class decides; ``OffloadManager`` moves
pages to lower tiers (backups, disk writes, eviction), ``LoadBackManager`` loads them back, ``PrefixMatcher`` finds
prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from forebay.engine.cache.actions import Done
from forebay.engine.cache.config import TierConfig
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.host.region import HostRegion
from forebay.engine.cache.interface import Int32Array, Tier
from forebay.engine.cache.invariants import check_cache
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.load_back_manager import LoadBackManager
from forebay.engine.cache.offload.offload_manager import OffloadManager
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.prefix.allocate import LeaseAllocator
from forebay.engine.cache.prefix.insert import PrefixInserter
from forebay.engine.cache.prefix.match import PrefixMatcher
from forebay.engine.cache.prefix_match import DISK
from forebay.engine.cache.radix.tree import token_bytes
from forebay.engine.cache.report import snapshot, stats
from forebay.engine.cache.state import CacheState
from forebay.engine.cache.tiers import Tiers
from forebay.engine.cache.transfer.executor import RankExecutor, TransferExecutor
from forebay.kv.pool_sizes import host_pages
from forebay.kv.spec import KVSpec

__all__ = ["PrefixCache", "host_page_counts"]

_RESERVE_PAGES = (64, 256)
"""``write_back`` keeps this many device and host pages free ahead of need (or a 16th and an 8th of a small pool)."""
_MAX_DISK_LOADS = 128
_MAX_SAVING_S = 0.05
"""The longest that an allocation waits for pages that ``write_back`` is saving; copying one takes microseconds."""


def host_page_counts(spec: KVSpec, config: TierConfig) -> tuple[int, ...]:
    """Pages of each group's host pool. Without a host tier: staging pages, or none without a disk tier either."""
    settings = config.settings
    if settings.host_bytes:
        return host_pages(spec, settings.host_bytes, config.host_sequence_tokens)
    return (config.staging_pages if settings.disk_dir is not None else 0,) * len(spec.groups)


class PrefixCache:
    """Rank 0's cache; implements ``PrefixCacheProtocol``. Not thread-safe: one thread calls it.

    Args:
        spec: what a page is.
        config: sizes and policies.
        executor: carries out transfers; None: the device is the only tier.
        store: the disk tier; it is written and read through ``executor``.
        clock: seconds, for ages and time limits.
    """

    def __init__(
        self,
        spec: KVSpec,
        config: TierConfig,
        executor: TransferExecutor | None = None,
        store: DiskStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.config = config.validate(spec)
        self.store = store
        self._clock = clock
        self._page = spec.page_size
        self._groups = range(len(spec.groups))
        self._windowed = [g for g, group in enumerate(spec.groups) if group.window is not None]
        self._full = [g for g, group in enumerate(spec.groups) if group.window is None]
        counts = host_page_counts(spec, config) if executor is not None else (0,) * len(spec.groups)
        self.pools = CachePools(
            spec.page_size, config.device_pages, counts, config.settings.eviction, self._recompute_cost
        )
        self.tree = self.pools.tree
        if store is not None:
            self.tree.root.digest = store.namespace
        self._tiers = tiers = Tiers(spec, config, self.pools, executor, store, clock)
        self.accounting, self.rates = tiers.accounting, tiers.rates
        self.offload = OffloadManager(tiers, self._lease_idle)
        self.load_back = LoadBackManager(tiers, self.offload, self._lease_idle, self._lease_loaded)
        self._matcher = PrefixMatcher(tiers)
        self._allocator = LeaseAllocator(tiers, self.offload, self.load_back, self._make_room)
        self._inserter = PrefixInserter(tiers, self._matcher)
        self.executor: RankExecutor | None = None
        self.region: HostRegion | None = None
        """With ``executor``, for the worker: other ranks attach to the region and report to the executor."""
        self.resources = ExitStack()
        """Closed by ``close_tiers``; the code that builds the tiers registers what must be closed."""
        self._ended_loads: list[Done] = []
        """Loads and disk reads that have ended and are not handled yet."""
        self.leases: set[CacheLease] = set()
        """Open leases, and closed ones that wait for a transfer."""
        self._state = CacheState(tiers, self.offload, self.load_back, self.leases)

    # -- leases ---------------------------------------------------------------------------------------------------

    def open(self, tokens: Int32Array) -> CacheLease | None:
        self.pools.now = self._clock()
        use_disk = self.store is not None and len(self.load_back.loads) < _MAX_DISK_LOADS
        match = self._matcher.match_prefix(tokens, use_disk=use_disk)
        lease = self._allocator.allocate_with_prefix(match, len(tokens))
        if lease is None and any(DISK in places[: match.length] for places in match.where):
            # Pages from disk need host pages as well, and those may be what is missing.
            match = self._matcher.match_prefix(tokens, use_disk=False)
            lease = self._allocator.allocate_with_prefix(match, len(tokens))
        if lease is not None:
            self.leases.add(lease)
            self.accounting.loads_declined_tokens += match.declined * self._page
            if not lease.waits_for:
                self.accounting.hit(lease.cached, self.rates)
        return lease

    def extend(self, lease: CacheLease, num_tokens: int) -> bool:
        more = -(-num_tokens // self._page) - lease.num_pages
        if more <= 0:
            return True
        self.pools.now = self._clock()
        if any(self.pools.device_room(group) < more for group in self._groups):
            return False
        if not self._make_room([more] * len(self._groups)):
            return False
        lease.reserve(lease.num_pages + more)
        for group in self._groups:
            lease.tables[group][lease.num_pages : lease.num_pages + more] = self.pools.device[group].allocate(more)
        lease.num_pages += more
        return True

    def _make_room(self, counts: list[int]) -> bool:
        """Free so many pages of each group; waits a moment for pages that ``write_back`` is saving."""
        executor = self._tiers.executor
        deadline = self._clock() + _MAX_SAVING_S
        while True:
            is_over = executor is None or self._clock() > deadline
            # All groups are asked before the result is looked at, so that saving begins in all of them.
            ready = [self.offload.evict_device(group, counts[group], lose=is_over) for group in self._groups]
            if all(ready):
                return True
            if executor is None or is_over or not self.offload.is_saving:
                return False
            executor.wait(0.002)
            # Ended loads are left to ``process_completions``: in the caller's match they are still arriving.
            self._handle_done(loads=False)

    def commit(self, lease: CacheLease, tokens: Int32Array) -> None:
        start, stop = len(lease.nodes), len(tokens) // self._page
        if stop > start:
            self.pools.now = self._clock()
            data = token_bytes(tokens[start * self._page : stop * self._page])
            step = self.tree.key_bytes
            keys = [data[offset : offset + step] for offset in range(0, len(data), step)]
            self._inserter.insert_prefix(lease, keys)
            self.accounting.committed_pages += stop - start
            for group in self._full:
                self.offload.queue_backups(lease, group, lease.nodes[start:stop])
            if start < lease.prompt_pages <= stop:
                # A request with the same prompt starts from the end of the prompt.
                for group in self._windowed:
                    first = self._matcher.first_readable(group, lease.prompt_pages * self._page)
                    self.offload.queue_backups(lease, group, lease.nodes[first : lease.prompt_pages])
            self._inserter.release_out_of_window(lease)

    def fail_load(self, lease: CacheLease) -> int:
        self.pools.now = self._clock()
        was_counted = not lease.waits_for
        if lease.layer_events is not None:
            self.accounting.layer_wait_s += lease.layer_events.waited_s
        self.load_back.detach(lease)
        good = self._good_pages(lease)
        nodes, firsts = lease.nodes, lease.first
        for group in self._groups:
            for page in lease.own_pages(group):
                self.pools.device[group].free(page)
        lease.duplicates.clear()
        lease.nodes = nodes[:good]
        lease.first = [self._matcher.first_readable(group, good * self._page) for group in self._groups]
        for group in self._groups:
            first, table = lease.first[group], lease.tables[group]
            self.pools.inc_lock_ref(group, lease.nodes[first:])
            table[:] = -1
            # Another lease may have computed a page meanwhile: the tree has its copy.
            table[first:good] = [n.slot(group).device.page for n in lease.nodes[first:]]  # type: ignore[union-attr]
            self.pools.dec_lock_ref(group, nodes[firsts[group] :])
        lease.num_pages = good
        lease.tiers = lease.tiers[:good]
        lease.cached = self._allocator.count(lease.tiers)
        if not was_counted:
            self.accounting.hit(lease.cached, self.rates)
        return good * self._page

    def _good_pages(self, lease: CacheLease) -> int:
        """The longest prefix of the lease that is all on the device."""
        good = [
            [(c := node.slot(group).device) is not None and c.arriving is None for node in lease.nodes]
            for group in self._groups
        ]
        for length in range(len(lease.nodes), 0, -1):
            firsts = [self._matcher.first_readable(group, length * self._page) for group in self._groups]
            if all(all(good[group][firsts[group] : length]) for group in self._groups):
                return length
        return 0

    def close(self, lease: CacheLease) -> None:
        assert not lease.closed, "a lease was closed twice"
        self.pools.now = self._clock()
        lease.closed = True
        for group in self._groups:
            for page in lease.own_pages(group):
                self.pools.device[group].free(page)
        lease.duplicates.clear()
        lease.num_pages = len(lease.nodes)
        for group in self._windowed:
            self.offload.queue_backups(lease, group, lease.nodes[lease.first[group] :])
        if not lease.transfers:
            self._unlock(lease)

    def _unlock(self, lease: CacheLease) -> None:
        for op in lease.waits_for:
            # Only loads of other leases are left here.
            op.waiting.remove(lease)
        for group in self._groups:
            self.pools.dec_lock_ref(group, lease.nodes[lease.first[group] :])
        self.leases.discard(lease)

    # -- transfers ------------------------------------------------------------------------------------------------

    def process_completions(self) -> None:
        if self._tiers.executor is None:
            return
        self.pools.now = self._clock()
        self._handle_done()
        self.offload.submit_queued()
        self.offload.evict_ahead(*_RESERVE_PAGES)

    def _handle_done(self, *, loads: bool = True) -> None:
        ended = [*self._ended_loads, *self._tiers.running_executor.completed()]
        self._ended_loads = []
        for done in ended:
            if done.id in self.offload.backups:
                self.offload.backup_done(done)
            elif done.id in self.offload.disk_writes.writes:
                self.offload.disk_writes.write_done(done)
            elif not loads:
                self._ended_loads.append(done)
            elif done.id in self.load_back.loads:
                self.load_back.load_done(done)
            else:
                self.load_back.prefetch_done(done)

    @property
    def is_busy(self) -> bool:
        return self.offload.is_busy or self.load_back.is_busy

    def _lease_idle(self, lease: CacheLease) -> None:
        if lease.closed:
            self._unlock(lease)

    def _lease_loaded(self, lease: CacheLease) -> None:
        if lease.layer_events is not None:
            self.accounting.layer_wait_s += lease.layer_events.waited_s
        lease.layer_events = None
        if not lease.closed:
            self.accounting.hit(lease.cached, self.rates)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        self.rates.prefill.note(tokens, seconds)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no transfer is queued or under way; False: some still are after ``timeout_s``."""
        deadline = self._clock() + timeout_s
        while True:
            self.process_completions()
            if not self.is_busy:
                return True
            if self._tiers.executor is None or self._clock() > deadline:
                return False
            self._tiers.executor.wait(0.02)

    def flush(self, tier: Tier | None = None) -> dict[str, int]:
        self._drain_if_idle()
        everywhere = tier is None
        dropped: dict[str, int] = {}
        if everywhere or tier is Tier.DEVICE:
            evict = self.offload.drop_all_device if everywhere else self.offload.evict_all_device
            dropped[Tier.DEVICE.value] = sum(evict(group) for group in self._groups)
        if everywhere or tier is Tier.HOST:
            evict = self.offload.drop_all_host if everywhere else self.offload.evict_all_host
            dropped[Tier.HOST.value] = sum(evict(group) for group in self._groups)
        if self.store is not None and (everywhere or tier is Tier.DISK):
            dropped[Tier.DISK.value] = self.store.clear()
        self._drain_if_idle()
        return dropped

    def _drain_if_idle(self) -> None:
        if all(lease.closed for lease in self.leases):
            self.drain(self.config.load_timeout_s)
        else:
            self.process_completions()

    def close_tiers(self) -> None:
        """Finish transfers under way, seal the disk tier, unmap the host region. The cache cannot be used after it."""
        self.drain(self.config.load_timeout_s)
        self.resources.close()

    # -- inspection -----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        self.pools.now = self._clock()
        return stats(self._state)

    def snapshot(self, prefixes: int = 20) -> dict[str, Any]:
        """For GET /cache: the tree's size, the hottest prefixes (token counts, never tokens), each tier's state."""
        self.pools.now = self._clock()
        return snapshot(self._state, prefixes)

    def check(self) -> None:
        check_cache(self._state)

    def _recompute_cost(self, depth: int) -> float:
        """Cost of recomputing the page with this number; the first page costs 1."""
        return 1.0 + depth * self._page / self.config.cost_doubles_at_tokens
