"""Transfers under way, as rank 0 remembers them: which copies they read and fill, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.engine.cache.interface import Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.radix.node import CachedPage, Node

__all__ = ["BackupOp", "LoadOp", "PageTransfer", "WriteOp"]


@dataclass(slots=True, eq=False)
class PageTransfer:
    """One page of one group. ``host`` is the slot's copy, or a staging page that no slot knows."""

    group: int
    node: Node
    device: CachedPage | None
    host: CachedPage


@dataclass(slots=True, eq=False)
class BackupOp:
    """Device -> host. ``held`` are slots it keeps; for an eviction there are none, the device copies have a reader."""

    id: int
    items: list[PageTransfer]
    held: list[tuple[int, list[Node]]]
    leases: list[CacheLease]
    """Leases whose closing waits for it, so that pages become evictable in their order."""


@dataclass(slots=True, eq=False)
class WriteOp:
    """Host -> disk. The host copies have a reader."""

    id: int
    items: list[PageTransfer]


@dataclass(slots=True, eq=False)
class LoadOp:
    """Host (or disk, through the host) -> device, all of one lease's pages from that tier. It holds their slots."""

    id: int
    tier: Tier
    items: list[PageTransfer]
    owner: CacheLease | None
    """The lease it was started for; its closing waits for it. None once that lease has given it up."""
    waiting: list[CacheLease] = field(default_factory=list)
    """Leases with a gate on it."""
    read_id: int = -1
    """The disk read, until it has ended."""
    word: int = -1
    """Its control word."""
    load_ok: bool | None = None
    """How the load has ended; None: it has not."""
    bad: set[int] = field(default_factory=set)
    """Items that could not be read from disk."""

    @property
    def over(self) -> bool:
        return self.load_ok is not None and self.read_id < 0
