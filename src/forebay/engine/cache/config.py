"""Everything the cache can be told, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from forebay.errors import UsageError
from forebay.kv.spec import KVSpec

__all__ = ["Eviction", "FsyncPolicy", "LoadPolicy", "TierConfig", "WritePolicy"]


class WritePolicy(StrEnum):
    """When a page is backed up to the next tier (SGLang's names and meanings)."""

    WRITE_THROUGH = "write_through"
    """As soon as it has been computed."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is used a second time."""
    WRITE_BACK = "write_back"
    """When it is evicted from the tier above."""


class Eviction(StrEnum):
    """What goes first when a pool is full."""

    LRU = "lru"
    LFU = "lfu"
    COST = "cost"


class LoadPolicy(StrEnum):
    """What to do with a prefix that is in the host or disk tier."""

    ALWAYS = "always"
    NEVER = "never"
    AUTO = "auto"
    """Load where the measured rates say that it takes less time than recomputing."""


class FsyncPolicy(StrEnum):
    """When segment files are forced to the medium. A record is checked when read,
    so none of them risks a wrong page.
    """

    NEVER = "never"
    """The kernel decides; a power cut loses what it had not written. A killed process loses nothing it had appended."""
    SEAL = "seal"
    """Once a segment, when it is full and its index is written."""
    ALWAYS = "always"
    """After every batch of records."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Settings of one server's cache; sizes are bytes in total over the node unless they say otherwise."""

    device_pages: tuple[int, ...]
    """Pages of each layer group's device pool, per rank (the same on every rank)."""
    host_bytes: int = 0
    """The host tier's budget, in total; 0: no host tier."""
    disk_dir: Path | None = None
    """Folder of the disk tier; None: no disk tier."""
    disk_bytes: int = 0
    """The disk tier's budget."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: Eviction = Eviction.LRU
    load: LoadPolicy = LoadPolicy.AUTO
    fsync: FsyncPolicy = FsyncPolicy.NEVER
    fingerprint: str = ""
    """Names the model's weights and dtype: pages on disk are salted with it."""
    tp: int = 1
    """Ranks."""
    host_sequence_tokens: int = 4096
    """A sequence's usual length, by which the host budget is split between full groups and those with a window."""
    host_reserve_bytes: int | None = None
    """Memory that the host tier must leave to everybody else; None: a twentieth of what is available, 0.5 to 8 GiB."""
    segment_bytes: int = 256 * 2**20
    """Size of a segment file, and so the unit in which the disk tier evicts; at most an eighth of ``disk_bytes``."""
    staging_pages: int = 256
    """Without a host tier: host pages of each group through which pages move between device and disk. A request can
    bring back at most this many from disk."""
    load_timeout_s: float = 10.0
    """A load that takes longer than this and than four times its estimate is given up and recomputed."""
    queue_pages: int = 4096
    """Pages on their way to the host, and pages on their way to disk, at most; beyond it pages are not backed up
    (counted as drops: ``backup_queue_full``, ``disk_queue_full``)."""
    cost_doubles_at_tokens: int = 8192
    """``cost`` eviction: a token after this many others costs twice as much to recompute as the first one."""

    def validate(self, spec: KVSpec) -> TierConfig:
        """Return self if it can work for ``spec``.

        Raises:
            UsageError: naming the setting and a value that works.
        """
        if len(self.device_pages) != len(spec.groups):
            raise UsageError(f"device pool: {len(self.device_pages)} sizes for {len(spec.groups)} layer groups")
        if min(self.device_pages) < 1:
            raise UsageError("device pool: a layer group has no page", fix="raise --device-cache")
        if (self.disk_dir is None) != (self.disk_bytes == 0):
            raise UsageError(
                "disk tier: the folder and the size belong together", fix="give --disk-cache and --disk-size"
            )
        if self.disk_dir is not None and not self.fingerprint:
            raise UsageError("disk tier: no model fingerprint to name the pages by")
        for group in spec.groups:
            for part in group.parts:
                part.heads_per_rank(self.tp)
        return self
