"""What the scheduler sees of the cache, and what the cache needs of the world. No models, no HTTP.

One PrefixCache decides, on rank 0; a TransferExecutor on every rank moves bytes. Page life:

    free -> private to a lease -> in the tree (shared, locked while any lease uses it) -> evictable -> free
                                     |  back up (device -> host, host -> disk)
                                     '  load back (disk -> host -> device), layer by layer

A *lease* is one sequence's hold on its pages. The scheduler opens it, extends it before each step, commits what a step
has computed, and closes it when the sequence finishes, is cancelled or is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CachedTokens", "DeviceBuffers", "Lease", "PrefixCacheProtocol", "Tier"]

Int32Array = npt.NDArray[np.int32]


class Tier(StrEnum):
    """device, host, disk: SGLang's L1, L2, L3."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens a lease did not have to compute, by the tier they came from; they add up to ``total``."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


class DeviceBuffers(Protocol):
    """One rank's device pool as plain memory (the runner owns the tensors).

    For each group, each (layer, part) is one array of shape (num_pages, heads_per_rank, page_size, dim), contiguous:
    a page of it is ``page_stride(group, part)`` bytes at ``address(group, layer_index, part) + page * stride``.
    """

    def num_pages(self, group: int) -> int:
        """Pages in ``group``'s pool; page ids are 0 .. num_pages - 1."""

    def address(self, group: int, layer_index: int, part: int) -> int:
        """Address of page 0 of the ``layer_index``-th layer of the group, part ``part``."""

    def page_stride(self, group: int, part: int) -> int:
        """Bytes a page of one layer's part on this rank."""


class Lease(Protocol):
    """One sequence's hold on its pages."""

    @property
    def cached(self) -> CachedTokens:
        """The prefix found in the tiers; it needs no computing unless a gate fails."""

    @property
    def page_tables(self) -> list[Int32Array]:
        """Per group: page number -> device page; -1 where a window cannot read any more."""

    @property
    def gate(self) -> Any | None:
        """A LayerGate while pages are still arriving, else None (see runtime.step.LayerGate)."""


class PrefixCacheProtocol(Protocol):
    """Rank 0's cache. Not thread-safe: one thread calls it; transfers run on threads of their own."""

    def open(self, tokens: Int32Array) -> Lease | None:
        """Find, lock and (by policy) start loading the longest usable prefix of ``tokens``, at most len(tokens) - 1.

        Allocates device pages only for what is loaded. None: not enough device pages now; nothing was changed.
        """

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Make room for positions 0 .. num_tokens - 1, evicting if needed. All or nothing; False: no pages now."""

    def commit(self, lease: Lease, tokens: Int32Array) -> None:
        """The KV of ``tokens`` (the whole sequence so far) has been computed: full pages join the tree.

        A page another lease committed first is shared and ours is freed. The write policy may start backups.
        """

    def fail_load(self, lease: Lease) -> int:
        """The lease's gate failed: drop what did not arrive;
        returns how many tokens are still good (recompute after).
        """

    def close(self, lease: Lease) -> None:
        """Unlock everything, free the partial page. Safe to call once, also while the lease's load is in flight."""

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens in ``seconds``: what loading is weighed against."""

    def poll(self) -> None:
        """Take note of finished transfers, start what waits for room. Called once a step and when idle;
        never blocks.
        """

    @property
    def is_busy(self) -> bool:
        """True while transfers are under way or wait for room: poll() must be called again soon, also when idle."""

    def flush(self, tier: Tier | None = None) -> dict[str, int]:
        """Drop all unlocked copies in ``tier`` (None: everywhere); returns pages dropped a tier."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: tokens by tier and state, hits, backups, loads, drops by reason, bytes, seconds."""

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken: one owner a page a tier, counts add up, locks balance."""
