"""The parts of one cache, gathered for code that inspects them: the invariants and the report."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.engine.cache.accounting import Accounting, Rates
from forebay.engine.cache.config import TierConfig
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.load_back_manager import LoadBackManager
from forebay.engine.cache.offload.offload_manager import OffloadManager
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.radix.tree import PageTree
from forebay.kv.spec import KVSpec

__all__ = ["CacheState"]


@dataclass(frozen=True, slots=True)
class CacheState:
    """What a ``PrefixCache`` consists of. The parts change; which parts they are does not."""

    spec: KVSpec
    config: TierConfig
    pools: CachePools
    offload: OffloadManager
    load_back: LoadBackManager
    store: DiskStore | None
    leases: set[CacheLease]
    """Open ones, and closed ones that wait for a transfer."""
    accounting: Accounting
    rates: Rates

    @property
    def tree(self) -> PageTree:
        return self.pools.tree
