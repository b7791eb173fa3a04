"""The parts of one cache, gathered for code that inspects them: the invariants and the report."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.load_back_manager import LoadBackManager
from forebay.engine.cache.offload.offload_manager import OffloadManager
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.radix.tree import PageTree
from forebay.engine.cache.tiers import Tiers
from forebay.kv.spec import KVSpec

__all__ = ["CacheState"]


@dataclass(frozen=True, slots=True)
class CacheState:
    """The parts of a ``PrefixCache``. Their contents change; which objects they are does not."""

    tiers: Tiers
    offload: OffloadManager
    load_back: LoadBackManager
    leases: set[CacheLease]
    """Open leases, and closed ones that wait for a transfer."""

    @property
    def spec(self) -> KVSpec:
        return self.tiers.spec

    @property
    def pools(self) -> CachePools:
        return self.tiers.pools

    @property
    def tree(self) -> PageTree:
        return self.tiers.pools.tree
