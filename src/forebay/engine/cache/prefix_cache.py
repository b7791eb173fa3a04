"""The cache as the scheduler sees it: leases over a tree of pages (see ``interface.py`` for the contract).

It decides; ``OffloadManager`` moves pages down (backups, disk, eviction), ``LoadBackManager`` brings them up,
``PrefixMatcher`` finds prefixes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from forebay.engine.cache.accounting import Accounting, Rates
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
from forebay.engine.cache.transfer.executor import RankExecutor, TransferExecutor
from forebay.kv.pool_sizes import host_pages
from forebay.kv.spec import KVSpec

__all__ = ["PrefixCache", "host_page_counts"]

_RESERVE_PAGES = (64, 256)
"""``write_back`` keeps this many device and host pages free ahead of need (or a 16th and an 8th of a small pool)."""
_MAX_DISK_LOADS = 128
_SAVING_S = 0.05
"""An allocation waits this long at most for pages that ``write_back`` is saving; copying one takes microseconds."""


def host_page_counts(spec: KVSpec, config: TierConfig) -> tuple[int, ...]:
    """Pages of each group's host pool; without a host tier those for staging, without a disk tier either none."""
    if config.host_bytes:
        return host_pages(spec, config.host_bytes, config.host_sequence_tokens)
    return (config.staging_pages if config.disk_dir is not None else 0,) * len(spec.groups)


class PrefixCache:
    """Rank 0's cache. Not thread-safe: one thread calls it. With ``executor`` None the device is the only tier.

    Args:
        spec: what a page is.
        config: sizes and policies.
        executor: carries out transfers.
        store: the disk tier; its writing and reading go through ``executor``.
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
        self.accounting = Accounting()
        self.rates = Rates()
        self.store = store
        self._executor = executor
        self._clock = clock
        self._page = spec.page_size
        self._groups = range(len(spec.groups))
        self._windowed = [g for g, group in enumerate(spec.groups) if group.window is not None]
        self._full = [g for g, group in enumerate(spec.groups) if group.window is None]
        has_host = executor is not None and config.host_bytes > 0
        counts = host_page_counts(spec, config) if executor is not None else (0,) * len(spec.groups)
        self.pools = CachePools(spec.page_size, config.device_pages, counts, config.eviction, self._cost)
        self.tree = self.pools.tree
        if store is not None:
            self.tree.root.digest = store.namespace
        ids = itertools.count(1)
        self.offload = OffloadManager(
            self.pools,
            executor,
            store,
            staging=not has_host,
            policy=config.write_policy,
            queue_pages=config.queue_pages,
            ids=ids,
            accounting=self.accounting,
            lease_free=self._transfers_over,
        )
        self.load_back = LoadBackManager(
            self.pools,
            executor,
            self.offload,
            page_bytes=[spec.page_bytes(g) for g in self._groups],
            load_timeout_s=config.load_timeout_s,
            ids=ids,
            accounting=self.accounting,
            rates=self.rates,
            lease_free=self._transfers_over,
            settled=self._loads_arrived,
        )
        self._matcher = PrefixMatcher(spec, self.tree, store, config.load, self.rates, has_host=has_host)
        self._opening = LeaseAllocator(spec.page_size, self.pools, self.offload, self.load_back, self._make_room)
        self._joining = PrefixInserter(spec, self.pools, self._matcher, has_disk=store is not None)
        self.executor: RankExecutor | None = None
        self.region: HostRegion | None = None
        """With ``executor``, for the worker: other ranks attach to the region and report to the executor."""
        self.closers: list[Callable[[], object]] = []
        """What ``close_tiers`` calls, in order; whoever built the tiers fills it."""
        self._ended_loads: list[Done] = []
        """Loads and disk reads that have ended and are not taken note of yet."""
        self.leases: set[CacheLease] = set()
        """Open ones, and closed ones that wait for a transfer."""
        self._state = CacheState(
            spec, self.config, self.pools, self.offload, self.load_back, store, self.leases, self.accounting, self.rates
        )

    # -- leases ---------------------------------------------------------------------------------------------------

    def open(self, tokens: Int32Array) -> CacheLease | None:
        """Find, lock and (by policy) start loading the longest usable prefix of ``tokens``, at most len(tokens) - 1.

        Allocates device pages only for what is loaded. None: not enough device pages now; nothing was changed.
        """
        self.pools.now = self._clock()
        use_disk = self.store is not None and len(self.load_back.loads) < _MAX_DISK_LOADS
        match = self._matcher.find(tokens, use_disk=use_disk)
        lease = self._opening.lease(match, len(tokens))
        if lease is None and any(DISK in places[: match.length] for places in match.where):
            # The disk needs host pages as well, and they may be what is missing.
            match = self._matcher.find(tokens, use_disk=False)
            lease = self._opening.lease(match, len(tokens))
        if lease is not None:
            self.leases.add(lease)
            self.accounting.loads_declined_tokens += match.declined * self._page
            if not lease.waits_for:
                self.accounting.hit(lease.cached, self.rates)
        return lease

    def extend(self, lease: CacheLease, num_tokens: int) -> bool:
        """Make room for positions 0 .. num_tokens - 1, evicting if needed. All or nothing; False: no pages now."""
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
            lease.tables[group][lease.num_pages : lease.num_pages + more] = self.pools.device[group].take(more)
        lease.num_pages += more
        return True

    def _make_room(self, counts: list[int]) -> bool:
        """Free so many pages of each group; waits a moment for pages that ``write_back`` is just saving."""
        deadline = time.monotonic() + _SAVING_S
        while True:
            is_over = self._executor is None or time.monotonic() > deadline
            # Every group is asked, so that saving has begun in all of them.
            ready = [self.offload.make_device_room(group, counts[group], lose=is_over) for group in self._groups]
            if all(ready):
                return True
            if self._executor is None or is_over or not self.offload.is_saving:
                return False
            self._executor.wait(0.002)
            # Loads that have ended are noted by the next poll: the caller has matched against what is arriving now.
            self._note_done(loads=False)

    def commit(self, lease: CacheLease, tokens: Int32Array) -> None:
        """The KV of ``tokens`` (the whole sequence so far) has been computed: full pages join the tree.

        A page another lease committed first is shared and ours is freed. The write policy may start backups.
        """
        start, stop = len(lease.nodes), len(tokens) // self._page
        if stop > start:
            self.pools.now = self._clock()
            data = token_bytes(tokens[start * self._page : stop * self._page])
            step = self.tree.key_bytes
            keys = [data[offset : offset + step] for offset in range(0, len(data), step)]
            self._joining.join(lease, keys)
            self.accounting.committed_pages += stop - start
            for group in self._full:
                self.offload.used(lease, group, lease.nodes[start:stop])
            if start < lease.prompt_pages <= stop:
                # Where the prompt ends is where the same prompt is taken up again.
                for group in self._windowed:
                    first = self._matcher.first_readable(group, lease.prompt_pages * self._page)
                    self.offload.used(lease, group, lease.nodes[first : lease.prompt_pages])
            self._joining.leave_windows(lease)

    def fail_load(self, lease: CacheLease) -> int:
        """The lease's gate failed: drop what did not arrive; returns how many tokens are still good (recompute after).

        All pages after those are given back, the lease's own as well: extend it again before the next step.
        """
        self.pools.now = self._clock()
        was_counted = not lease.waits_for
        if lease.gate is not None:
            self.accounting.gate_wait_s += lease.gate.waited_s
        self.load_back.give_up(lease)
        good = self._good_pages(lease)
        nodes, firsts = lease.nodes, lease.first
        for group in self._groups:
            for page in lease.own_pages(group):
                self.pools.device[group].give(page)
        lease.duplicates.clear()
        lease.nodes = nodes[:good]
        lease.first = [self._matcher.first_readable(group, good * self._page) for group in self._groups]
        for group in self._groups:
            first, table = lease.first[group], lease.tables[group]
            self.pools.hold(group, lease.nodes[first:])
            table[:] = -1
            # Whoever was faster may have put another copy in its place.
            table[first:good] = [n.slot(group).device.page for n in lease.nodes[first:]]  # type: ignore[union-attr]
            self.pools.release(group, nodes[firsts[group] :])
        lease.num_pages = good
        lease.tiers = lease.tiers[:good]
        lease.cached = self._opening.count(lease.tiers)
        if not was_counted:
            self.accounting.hit(lease.cached, self.rates)
        return good * self._page

    def _good_pages(self, lease: CacheLease) -> int:
        """The longest prefix of the lease's that is all on the device."""
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
        """Unlock everything, free the partial page. Safe to call once, also while the lease's load is in flight.

        Its tree pages stay locked until transfers that were started for it have ended, so that they become evictable
        from the deepest up, as every lease's do.
        """
        assert not lease.closed, "a lease was closed twice"
        self.pools.now = self._clock()
        lease.closed = True
        for group in self._groups:
            for page in lease.own_pages(group):
                self.pools.device[group].give(page)
        lease.duplicates.clear()
        lease.num_pages = len(lease.nodes)
        for group in self._windowed:
            self.offload.used(lease, group, lease.nodes[lease.first[group] :])
        if not lease.transfers:
            self._let_go(lease)

    def _let_go(self, lease: CacheLease) -> None:
        for op in lease.waits_for:
            # Loads that another lease started.
            op.waiting.remove(lease)
        for group in self._groups:
            self.pools.release(group, lease.nodes[lease.first[group] :])
        self.leases.discard(lease)

    # -- transfers ------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take note of finished transfers, start what waits for room. Called once a step and when idle;
        never blocks.
        """
        if self._executor is None:
            return
        self.pools.now = self._clock()
        self._note_done()
        self.offload.start_queued()
        self.offload.keep_reserve(*_RESERVE_PAGES)

    def _note_done(self, *, loads: bool = True) -> None:
        assert self._executor is not None, "a transfer without an executor"
        ended = [*self._ended_loads, *self._executor.completed()]
        self._ended_loads = []
        for done in ended:
            if done.id in self.offload.backups:
                self.offload.backup_done(done)
            elif done.id in self.offload.to_disk.writes:
                self.offload.to_disk.write_done(done)
            elif not loads:
                self._ended_loads.append(done)
            elif done.id in self.load_back.loads:
                self.load_back.load_done(done)
            else:
                self.load_back.read_done(done)

    @property
    def is_busy(self) -> bool:
        """True while a transfer is queued or under way: somebody should poll again soon."""
        return self.offload.busy or self.load_back.busy

    def _transfers_over(self, lease: CacheLease) -> None:
        if lease.closed:
            self._let_go(lease)

    def _loads_arrived(self, lease: CacheLease) -> None:
        if lease.gate is not None:
            self.accounting.gate_wait_s += lease.gate.waited_s
        lease.gate = None
        if not lease.closed:
            self.accounting.hit(lease.cached, self.rates)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """The runner computed ``tokens`` prompt tokens in ``seconds``: what ``auto`` weighs loading against."""
        self.rates.prefill.note(tokens, seconds)

    def settle(self, timeout_s: float) -> bool:
        """Poll until no transfer is under way; False: some still are after ``timeout_s``. Blocks."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll()
            if not self.is_busy:
                return True
            if time.monotonic() > deadline or self._executor is None:
                return False
            self._executor.wait(0.02)

    def flush(self, tier: Tier | None = None) -> dict[str, int]:
        """Drop all unlocked copies in ``tier`` (None: everywhere); returns pages dropped a tier.

        With no request running it first waits for transfers under way, so that pages being backed up are not spared and
        then found again; requests that run are not kept waiting for that. From one tier alone pages go as the write
        policy has it: ``write_back`` saves them in the tier below. Otherwise pages without another copy are lost.
        """
        self._settle_if_idle()
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
        self._settle_if_idle()
        return dropped

    def _settle_if_idle(self) -> None:
        if all(lease.closed for lease in self.leases):
            self.settle(self.config.load_timeout_s)
        else:
            self.poll()

    def close_tiers(self) -> None:
        """Finish transfers under way, seal the disk tier, give the host region back.
        The cache is of no use after it.
        """
        self.settle(self.config.load_timeout_s)
        for close in self.closers:
            close()
        self.closers = []

    # -- looking at it --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: tokens by tier and state, hits, backups, loads, drops by reason, bytes, seconds."""
        self.pools.now = self._clock()
        return stats(self._state)

    def snapshot(self, prefixes: int = 20) -> dict[str, Any]:
        """For GET /cache: the tree's size, the hottest prefixes (token counts, never tokens), each tier's state."""
        self.pools.now = self._clock()
        return snapshot(self._state, prefixes)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken: one owner a page a tier, counts add up, locks balance."""
        check_cache(self._state)

    def _cost(self, depth: int) -> float:
        """What recomputing the page with this number takes, in units of the first page's."""
        return 1.0 + depth * self._page / self.config.cost_doubles_at_tokens
