"""The cache's settings: what the user asks for, and what one server's tiers are built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from forebay.errors import UsageError
from forebay.kv.pool_sizes import PAGE_SIZE
from forebay.kv.spec import KVSpec

__all__ = ["CacheConfig", "Eviction", "FsyncPolicy", "LoadPolicy", "TierConfig", "WritePolicy"]


class WritePolicy(StrEnum):
    """When a page is backed up to the next tier (SGLang's names and meanings)."""

    WRITE_THROUGH = "write_through"
    """As soon as it has been computed."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is used a second time."""
    WRITE_BACK = "write_back"
    """When it is evicted from the tier above."""


class Eviction(StrEnum):
    """Which page is evicted first when a pool is full."""

    LRU = "lru"
    LFU = "lfu"
    COST = "cost"


class LoadPolicy(StrEnum):
    """What to do with a prefix that is in the host or disk tier."""

    AUTO = "auto"
    """Load where the measured rates say that it takes less time than recomputing."""
    ALWAYS = "always"
    NEVER = "never"


class FsyncPolicy(StrEnum):
    """When segment files are forced to the medium. Every record is checked when it is read, whatever the policy."""

    NEVER = "never"
    """The kernel decides; a power cut loses what it had not written. A killed process loses nothing it had appended."""
    SEAL = "seal"
    """Once per segment, when it is full and its index is written."""
    ALWAYS = "always"
    """After every batch of records."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for. Sizes are bytes in total over the ranks of this node."""

    page_size: int = PAGE_SIZE
    """Token slots per page."""
    device_bytes: int | None = None
    """Device pool over all ranks; None: chosen from the available memory."""
    host_bytes: int = 0
    """The host tier's budget; 0: no host tier."""
    disk_dir: str | None = None
    """Folder of the disk tier; None: no disk tier."""
    disk_bytes: int = 0
    """The disk tier's budget."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: Eviction = Eviction.LRU
    load: LoadPolicy = LoadPolicy.AUTO

    def check(self) -> CacheConfig:
        """Return self if the values can work together.

        Raises:
            UsageError: naming the option and a value that works.
        """
        if self.page_size < 1:
            raise UsageError(f"--page-size: {self.page_size} is too small", fix="use 1 or more")
        if (self.disk_dir is None) != (self.disk_bytes == 0):
            raise UsageError(
                "--disk-cache and --disk-size belong together: the folder, and how much of it may be used",
                fix="give both, such as --disk-cache /var/cache/forebay --disk-size 100GB",
            )
        return self


@dataclass(frozen=True, slots=True)
class TierConfig:
    """What one server's tiers are built from: the user's settings, and what follows from the model and the machine."""

    device_pages: tuple[int, ...]
    """Pages of each layer group's device pool, per rank (the same on every rank)."""
    settings: CacheConfig = field(default_factory=CacheConfig)
    fingerprint: str = ""
    """Names the model's weights and dtype; part of the cache namespace of pages on disk."""
    tp: int = 1
    """Number of ranks."""
    fsync: FsyncPolicy = FsyncPolicy.NEVER
    host_sequence_tokens: int = 4096
    """A sequence's usual length, by which the host budget is divided between full groups and those with a window."""
    host_reserve_bytes: int | None = None
    """Memory that the host tier leaves to other processes; None: a twentieth of what is available, 0.5 to 8 GiB."""
    segment_bytes: int = 256 * 2**20
    """Size of a segment file, which is the unit of eviction on disk; at most an eighth of the disk tier's budget."""
    staging_pages: int = 256
    """Without a host tier: host pages of each group through which pages move between device and disk. A request can
    load at most this many from disk."""
    load_timeout_s: float = 10.0
    """A load is given up, and its tokens are recomputed, after this time and four times its estimate."""
    queue_pages: int = 4096
    """The most pages on their way to the host, and the most on their way to disk. Further pages are not backed up
    (counted as drops: ``backup_queue_full``, ``disk_queue_full``)."""
    cost_doubles_at_tokens: int = 8192
    """``cost`` eviction: a token after this many others costs twice as much to recompute as the first one."""

    def validate(self, spec: KVSpec) -> TierConfig:
        """Return self if it can work for ``spec``.

        Raises:
            UsageError: naming the setting and a value that works.
        """
        self.settings.check()
        if len(self.device_pages) != len(spec.groups):
            raise UsageError(f"device pool: {len(self.device_pages)} sizes for {len(spec.groups)} layer groups")
        if min(self.device_pages) < 1:
            raise UsageError("device pool: a layer group has no page", fix="raise --device-cache")
        if self.settings.disk_dir is not None and not self.fingerprint:
            raise UsageError("disk tier: no model fingerprint for the cache namespace")
        for group in spec.groups:
            for part in group.parts:
                part.heads_per_rank(self.tp)
        return self
