"""Transfers under way as rank 0 keeps them: which copies they read and fill, and for which leases."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.engine.cache.interface import Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.radix.node import CachedPage, Node

__all__ = ["BackupOp", "LoadOp", "PageTransfer", "WriteOp"]


@dataclass(slots=True, eq=False)
class PageTransfer:
    """One page of one group. ``host`` is the slot's copy, or a staging page that belongs to no slot."""

    group: int
    node: Node
    device: CachedPage | None
    host: CachedPage


@dataclass(slots=True, eq=False)
class BackupOp:
    """Device -> host. ``held`` are the slots that it locks; for an eviction there are none, the device copies have a
    reader."""

    id: int
    items: list[PageTransfer]
    held: list[tuple[int, list[Node]]]
    leases: list[CacheLease]
    """Leases whose pages stay locked until it ends, so that pages become evictable in their order."""


@dataclass(slots=True, eq=False)
class WriteOp:
    """Host -> disk. The host copies have a reader."""

    id: int
    items: list[PageTransfer]


@dataclass(slots=True, eq=False)
class LoadOp:
    """Host -> device, or disk -> host -> device: all pages of one lease from that tier. It locks their slots."""

    id: int
    tier: Tier
    items: list[PageTransfer]
    owner: CacheLease | None
    """The lease it was started for, whose pages stay locked until it ends. None once that lease has given it up."""
    waiting: list[CacheLease] = field(default_factory=list)
    """Leases whose layer events include it."""
    prefetch_id: int = -1
    """The disk read, until it has ended."""
    status_slot: int = -1
    """The disk read's status slot."""
    load_ok: bool | None = None
    """How the load has ended; None: it has not."""
    bad: set[int] = field(default_factory=set)
    """Items that could not be read from disk."""

    @property
    def is_complete(self) -> bool:
        """The load and its disk read, if any, have ended."""
        return self.load_ok is not None and self.prefetch_id < 0
