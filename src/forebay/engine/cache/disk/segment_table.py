"""Which segments there are in the disk tier's folder, and which page is where in them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from forebay.engine.cache.disk.format import RecordShape
from forebay.engine.cache.disk.segment import Entry, Segment, open_segment, segment_name, segment_number

__all__ = ["SegmentTable"]

log = logging.getLogger(__name__)

_OFFSET_BITS = 44
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_OPEN_FILES = 64


class SegmentTable:
    """The segments of one folder and an index of their pages by content address.

    ``has`` takes no lock. Every other method is called with ``lock`` held, except by the constructor's owner before
    other threads know the table.

    Args:
        folder: of the segment files.
        namespace: address of the empty prefix; segments of other namespaces belong to other models.
        shapes: by layer group.
    """

    def __init__(self, folder: Path, namespace: bytes, shapes: Mapping[int, RecordShape]) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.segments: dict[int, Segment] = {}
        self.appending: Segment | None = None
        """The segment that is written to; its file is not closed and it is not evicted."""
        self.counts: Counter[str] = Counter()
        """Drops by reason, segments evicted, pauses."""
        self._namespace = namespace
        self._shapes = shapes
        self._index: list[dict[bytes, int]] = [{} for _ in shapes]
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._tick = 0

    # -- pages ----------------------------------------------------------------------------------------------------

    def has(self, group: int, key: bytes) -> bool:
        """True if the page is on disk (and was good when last read)."""
        return key in self._index[group]

    def num_pages(self, group: int) -> int:
        """Pages of ``group`` on disk."""
        return len(self._index[group])

    def place(self, group: int, key: bytes) -> tuple[Segment, int] | None:
        """The segment that holds a page, and the offset of its record in it."""
        where = self._index[group].get(key)
        return None if where is None else (self.segments[where >> _OFFSET_BITS], where & _OFFSET_MASK)

    def add(self, segment: Segment, entries: Sequence[Entry]) -> None:
        """Pages have been written to ``segment``."""
        for group, key, offset in entries:
            self._index[group][key] = segment.number << _OFFSET_BITS | offset

    def drop_page(self, group: int, key: bytes) -> Segment | None:
        """Forget one page; returns the segment it was in."""
        where = self._index[group].pop(key, None)
        return None if where is None else self.segments.get(where >> _OFFSET_BITS)

    # -- segments -------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, other models' included."""
        return sum(segment.end for segment in self.segments.values())

    def create(self) -> Segment:
        """A new, empty segment, open for appending. Raises OSError."""
        number = 1 + max(self.segments, default=0)
        while (self.folder / segment_name(number)).exists():
            number += 1
        segment = self.segments[number] = Segment.create(self.folder, number, self._namespace)
        self._keep_open(segment)
        return segment

    def touch(self, segments: Sequence[Segment]) -> None:
        """These were just used: they are evicted after all others."""
        self._tick += 1
        for segment in segments:
            segment.last_used = self._tick

    def descriptor(self, segment: Segment) -> int:
        """The open file of ``segment``; closed again when too many others are used. Raises OSError."""
        descriptor = segment.open()
        self._keep_open(segment)
        return descriptor

    def evict(self) -> int:
        """Delete the segment used longest ago, other models' segments first; returns its bytes, 0 if there is none.

        Raises:
            OSError: it cannot be deleted; its pages are forgotten all the same.
        """
        numbers = [number for number, segment in self.segments.items() if segment is not self.appending]
        if not numbers:
            return 0
        segment = self.segments[min(numbers, key=lambda n: (self.segments[n].last_used, n))]
        self.forget(segment, "evicted")
        segment.delete()
        self.counts["segments_evicted"] += 1
        return segment.end

    def forget(self, segment: Segment, why: str) -> None:
        """Take a segment and its pages out of the table; its file stays."""
        del self.segments[segment.number]
        self._open.pop(segment.number, None)
        for group, key, _ in segment.entries:
            index = self._index[group]
            where = index.get(key)
            if where is not None and where >> _OFFSET_BITS == segment.number:
                del index[key]
                self.counts[f"pages_{why}"] += 1

    def forget_deleted(self) -> None:
        """Notice files that were deleted by others, so that their bytes are not counted."""
        for segment in list(self.segments.values()):
            if not segment.path.exists():
                self.forget(segment, "disk_file_deleted")
                segment.close()

    def _keep_open(self, segment: Segment) -> None:
        self._open[segment.number] = segment
        self._open.move_to_end(segment.number)
        while len(self._open) > _OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            if oldest is not self.appending:
                oldest.close()

    def rebuild(self) -> None:
        """Find what earlier servers left, oldest first, so that the newest copy of a page is the one that counts."""
        for path in sorted(self.folder.glob("segment-*.kv")):
            if segment_number(path.name) is None:
                continue
            try:
                segment = open_segment(path, self._namespace, self._shapes)
                if segment is None:
                    path.unlink()
                    continue
            except OSError as error:
                log.warning("disk tier: cannot read %s: %s", path, error)
                self.counts["disk_read_error"] += 1
                continue
            self.segments[segment.number] = segment
            self._tick = max(self._tick, segment.number)
            self.add(segment, [entry for entry in segment.entries if entry[0] in self._shapes])

    def check(self) -> None:
        """Raise AssertionError when the index and the segments disagree."""
        for group, index in enumerate(self._index):
            for where in index.values():
                segment = self.segments.get(where >> _OFFSET_BITS)
                assert segment is not None, "the index points into a segment that does not exist"
                end = (where & _OFFSET_MASK) + self._shapes[group].record_bytes
                assert end <= segment.end, "the index points beyond the end of a segment"
