"""The cache's transfers as records: rank 0 decides and issues them, every rank's transfers carry them out.

Records hold ids and page numbers only (no address, no handle, no callable), so they can be sent to another process as
they are. ``Backup`` and ``LoadBack`` go to every rank; ``DiskWrite`` and ``DiskRead`` to rank 0, which owns the disk
tier and reads and writes whole pages in the shared host region.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

__all__ = ["Action", "Backup", "DecisionDigest", "DiskPage", "DiskRead", "DiskWrite", "Done", "LoadBack", "PageMapping"]


@dataclass(frozen=True, slots=True)
class PageMapping:
    """Pages of one layer group: ``device_pages[i]`` and ``host_pages[i]`` hold the same tokens."""

    group: int
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy device pages to host pages. Each rank copies its heads; replicated heads are copied by one rank."""

    id: int
    mappings: tuple[PageMapping, ...]


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Copy host pages to device pages, layer by layer in the model's order.

    ``status_slot`` is the slot of the host region that says whether the host pages have arrived from disk; -1: they
    are in the host tier already.
    """

    id: int
    mappings: tuple[PageMapping, ...]
    status_slot: int = -1


@dataclass(frozen=True, slots=True)
class DiskPage:
    """One page of one group on disk: its content address, the tokens it must be for, and its host page."""

    group: int
    key: bytes
    tokens: bytes
    host_page: int


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """Append host pages to the disk tier."""

    id: int
    pages: tuple[DiskPage, ...]


@dataclass(frozen=True, slots=True)
class DiskRead:
    """Prefetch: fill host pages from the disk tier. ``status_slot`` is set when that is complete, or has failed."""

    id: int
    pages: tuple[DiskPage, ...]
    status_slot: int


Action = Backup | LoadBack | DiskWrite | DiskRead


@dataclass(frozen=True, slots=True)
class Done:
    """An action has ended, on all ranks.

    Args:
        id: the action's.
        ok: all of it worked. A disk action with bad pages is not ok; ``bad`` lists them.
        nbytes: bytes moved, over all ranks.
        seconds: from start to end on the slowest rank, without the time in the queue.
        bad: (index into the record's pages, reason) for each page that a disk action failed for.
        reason: why a Backup or LoadBack failed, as one word for the drop counters.
    """

    id: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0
    bad: tuple[tuple[int, str], ...] = ()
    reason: str = ""


class DecisionDigest:
    """A running hash over Backup and LoadBack records in their order. Equal on ranks that carried out the same list."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.count = 0

    def add(self, action: Backup | LoadBack) -> None:
        """Take one record into the digest."""
        self.count += 1
        self._hash.update(struct.pack("<cq", b"B" if isinstance(action, Backup) else b"L", action.id))
        for mapping in action.mappings:
            count = len(mapping.device_pages)
            self._hash.update(
                struct.pack(f"<qq{2 * count}q", mapping.group, count, *mapping.device_pages, *mapping.host_pages)
            )

    def value(self) -> tuple[int, int]:
        """(number of records, hash)."""
        return self.count, self._hash.intdigest()
