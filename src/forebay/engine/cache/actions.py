"""What the cache decides about bytes, as records: rank 0 issues them, every rank's transfers carry them out.

Records hold ids and page numbers only (no address, no handle, no callable), so that they can be sent to another process
as they are. ``Backup`` and ``LoadBack`` go to every rank; ``DiskWrite`` and ``DiskRead`` to rank 0, which owns the disk
tier and reads and writes whole pages in the shared host region.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

__all__ = ["Action", "Backup", "DecisionDigest", "DiskPage", "DiskRead", "DiskWrite", "Done", "LoadBack", "PageMapping"]


@dataclass(frozen=True, slots=True)
class PageMapping:
    """Pages of one layer group: ``device_pages[i]`` and ``host_pages[i]`` are the same tokens."""

    group: int
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy device pages to host pages: each rank its heads; replicated heads the first rank that has them."""

    id: int
    pieces: tuple[PageMapping, ...]


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Copy host pages to device pages, layer by layer in the model's order.

    ``progress`` is the control word of the host region that says whether the host pages have arrived from disk; -1:
    they are there.
    """

    id: int
    pieces: tuple[PageMapping, ...]
    progress: int = -1


@dataclass(frozen=True, slots=True)
class DiskPage:
    """One page of one group on disk: its content address and the tokens it must be for."""

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
    """Fill host pages from the disk tier; the control word ``progress`` says when that is done, or has failed."""

    id: int
    pages: tuple[DiskPage, ...]
    progress: int


Action = Backup | LoadBack | DiskWrite | DiskRead


@dataclass(frozen=True, slots=True)
class Done:
    """An action has ended. With more than one rank: on all of them.

    Args:
        id: the action's.
        ok: all of it worked. A disk action with bad pages is not ok; ``bad`` says which.
        nbytes: bytes moved, over all ranks.
        seconds: from start to end on the slowest rank, waiting in the queue not included.
        bad: (index into the record's pages, why) for each page that a disk action failed for.
        reason: why a Backup or Load failed, all of it, in one word for the drop counters.
    """

    id: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0
    bad: tuple[tuple[int, str], ...] = ()
    reason: str = ""


class DecisionDigest:
    """A running hash over the Backup and Load records in their order:
    ranks that agree have carried out the same list.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.count = 0

    def add(self, action: Backup | LoadBack) -> None:
        """Take one record into the digest."""
        self.count += 1
        self._hash.update(struct.pack("<cq", b"B" if isinstance(action, Backup) else b"L", action.id))
        for piece in action.pieces:
            count = len(piece.device_pages)
            self._hash.update(
                struct.pack(f"<qq{2 * count}q", piece.group, count, *piece.device_pages, *piece.host_pages)
            )

    def value(self) -> tuple[int, int]:
        """(records so far, hash)."""
        return self.count, self._hash.intdigest()
