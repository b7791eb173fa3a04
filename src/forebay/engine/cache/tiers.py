"""What the parts of one cache have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.engine.cache.accounting import Accounting, Rates
from forebay.engine.cache.config import TierConfig
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.transfer.executor import TransferExecutor
from forebay.kv.spec import KVSpec

__all__ = ["Tiers"]


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one cache and their bookkeeping. What they hold changes; which objects they are does not."""

    spec: KVSpec
    config: TierConfig
    pools: CachePools
    executor: TransferExecutor | None
    """Carries out transfers; None: the device is the only tier."""
    store: DiskStore | None
    """The disk tier, if there is one."""
    clock: Callable[[], float]
    """Seconds; for ages and time limits."""
    accounting: Accounting = field(default_factory=Accounting)
    rates: Rates = field(default_factory=Rates)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers for transfers."""

    @property
    def has_host(self) -> bool:
        """There is a host tier; otherwise host pages, if any, are staging pages."""
        return self.executor is not None and self.config.settings.host_bytes > 0

    @property
    def running_executor(self) -> TransferExecutor:
        """The executor, for code that is only reached when there is one."""
        assert self.executor is not None, "a transfer without an executor"
        return self.executor
