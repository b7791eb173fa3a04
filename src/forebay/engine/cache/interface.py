"""The cache as the scheduler and the worker see it. No models, no HTTP.

One PrefixCache decides, on rank 0; a TransferExecutor on every rank moves bytes. A page's life:

    free -> private to a lease -> in the tree (shared; locked while any lease uses it) -> evictable -> free
                                     |  back up (device -> host, host -> disk)
                                     '  load back (disk -> host -> device), layer by layer

A *lease* is one sequence's hold on its pages. The scheduler opens it (match and allocate the cached prefix), extends
it before each step (allocate pages), commits what a step has computed (insert into the tree), and closes it (free)
when the sequence finishes, is cancelled or is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forebay.engine.cache.transfer.layer_events import LoadEvents

__all__ = ["CachedTokens", "DeviceBuffers", "Lease", "PrefixCacheProtocol", "Tier"]

Int32Array = npt.NDArray[np.int32]


class Tier(StrEnum):
    """device, host, disk: SGLang's L1, L2, L3."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that a lease did not have to compute, by the tier they came from; their sum is ``total``."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


class DeviceBuffers(Protocol):
    """One rank's device pool as plain memory (the runner owns the tensors).

    For each group, each (layer, part) is one contiguous array of shape (num_pages, heads_per_rank, page_size, dim). A
    page of it is ``page_stride(group, part)`` bytes at ``address(group, layer_index, part) + page * stride``.
    """

    def num_pages(self, group: int) -> int:
        """Pages in ``group``'s pool; page ids are 0 .. num_pages - 1."""

    def address(self, group: int, layer_index: int, part: int) -> int:
        """Address of page 0 of the ``layer_index``-th layer of the group, part ``part``."""

    def page_stride(self, group: int, part: int) -> int:
        """Bytes per page of one layer's part on this rank."""


class Lease(Protocol):
    """One sequence's hold on its pages."""

    @property
    def cached(self) -> CachedTokens:
        """The prefix found in the tiers. It needs no computing, unless its load fails."""

    @property
    def page_tables(self) -> list[Int32Array]:
        """Per group: page number -> device page; -1 where the window has passed."""

    @property
    def layer_events(self) -> LoadEvents | None:
        """Wait for each layer while pages are still arriving; None when all have arrived."""


class PrefixCacheProtocol(Protocol):
    """Rank 0's cache. Not thread-safe: one thread calls it; transfers run on threads of their own."""

    def open(self, tokens: Int32Array) -> Lease | None:
        """Find, lock and (by policy) start loading the longest usable prefix of ``tokens``, at most len(tokens) - 1.

        Allocates device pages only for what is loaded. None: not enough device pages now; nothing was changed.
        """

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Allocate pages for positions 0 .. num_tokens - 1, evicting if needed. All or nothing; False: no pages now."""

    def commit(self, lease: Lease, tokens: Int32Array) -> None:
        """The KV of ``tokens`` (the whole sequence so far) has been computed: insert its full pages into the tree.

        Where another lease committed the same page first, that page is shared and this lease's is freed. The write
        policy may start backups.
        """

    def fail_load(self, lease: Lease) -> int:
        """The lease's load failed: drop what did not arrive; returns how many tokens are still good.

        All pages after those are freed, the lease's own as well: extend it again before the next step.
        """

    def close(self, lease: Lease) -> None:
        """Unlock everything, free the partial page. Called once per lease, also while its load is under way.

        Its pages in the tree stay locked until the transfers that were started for it have ended, so that they become
        evictable from the deepest up, like those of every lease.
        """

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens in ``seconds``. Loading is compared with this rate."""

    def process_completions(self) -> None:
        """Handle finished transfers and start queued ones. Called once per step and when idle; never blocks."""

    @property
    def is_busy(self) -> bool:
        """True while transfers are queued or under way: call ``process_completions`` again soon, also when idle."""

    def flush(self, tier: Tier | None = None) -> dict[str, int]:
        """Drop all unlocked copies in ``tier`` (None: everywhere); returns dropped pages per tier.

        With no request running it first waits for transfers under way, so that pages being backed up are dropped as
        well; running requests are not kept waiting for that. From one tier alone pages are evicted by the write
        policy: ``write_back`` saves them in the tier below. Otherwise pages without another copy are lost.
        """

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: tokens by tier and state, hits, backups, loads, drops by reason, bytes, seconds."""

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken: one owner per page per tier, counts add up, locks
        balance."""
