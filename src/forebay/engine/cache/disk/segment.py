"""One segment file: how it is found at start, appended to, sealed and read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from forebay.engine.cache.disk.format import (
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    RecordShape,
    pack_index,
    pack_segment_header,
    unpack_index,
    unpack_segment_header,
    unpack_trailer,
)

__all__ = ["Entry", "Segment", "open_segment", "segment_name", "segment_number"]

log = logging.getLogger(__name__)

Entry = tuple[int, bytes, int]
"""(group, address, offset)"""


def segment_name(number: int) -> str:
    """File name of segment ``number``."""
    return f"segment-{number:012d}.kv"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name, or None if it is not one."""
    if not (name.startswith("segment-") and name.endswith(".kv")):
        return None
    digits = name[len("segment-") : -len(".kv")]
    return int(digits) if digits.isdigit() else None


class Segment:
    """A segment file and its records.

    Args:
        path: the file.
        number: its number; offsets in the index are (number, offset).
        entries: its records; empty for another model's segment.
        end: where the next record goes; for a sealed or foreign one the size of the file.
        foreign: it belongs to another model (or page shape): never read, evicted first.
    """

    __slots__ = ("_file", "end", "entries", "foreign", "last_used", "number", "path")

    def __init__(self, path: Path, number: int, entries: list[Entry], end: int, *, foreign: bool = False) -> None:
        self.path = path
        self.number = number
        self.entries = entries
        self.end = end
        self.foreign = foreign
        self.last_used = number if not foreign else -1
        """The store's tick of the last hit."""
        self._file: int | None = None

    @classmethod
    def create(cls, folder: Path, number: int, namespace: bytes) -> Segment:
        """A new, empty segment, open for appending."""
        path = folder / segment_name(number)
        segment = cls(path, number, [], SEGMENT_HEADER_BYTES)
        segment._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(segment._file, [pack_segment_header(namespace, number)], 0)
        except OSError:
            segment.close()
            path.unlink(missing_ok=True)
            raise
        return segment

    def open(self) -> int:
        """The descriptor. Raises OSError, FileNotFoundError when somebody has deleted the file."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._file

    def close(self) -> None:
        """Close the descriptor; ``open`` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, buffers: Sequence[bytes | memoryview], entries: Sequence[Entry]) -> None:
        """Write whole records at the end; after an error the file ends where it did. Raises OSError."""
        descriptor = self.open()
        try:
            written = _write_all(descriptor, buffers, self.end)
        except OSError:
            os.ftruncate(descriptor, self.end)
            raise
        self.end += written
        self.entries.extend(entries)

    def seal(self) -> None:
        """Write the index, so that the next start does not have to look at each record. Raises OSError."""
        descriptor = self.open()
        try:
            self.end += _write_all(descriptor, [pack_index(self.entries, self.end)], self.end)
        except OSError:
            os.ftruncate(descriptor, self.end)
            raise

    def sync(self) -> None:
        """Force it to the medium. Raises OSError."""
        os.fdatasync(self.open())

    def delete(self) -> None:
        """Remove the file; readers that have it open can finish."""
        self.close()
        self.path.unlink(missing_ok=True)


def open_segment(path: Path, namespace: bytes, shapes: Mapping[int, RecordShape]) -> Segment | None:
    """A segment found at start; None: the file is not a segment, or has no record.

    A sealed segment's index is used if its checksum is right. Otherwise the headers are followed from record to
    record up to the first that is not whole; the file is cut there and sealed. Raises OSError when it cannot be read.
    """
    number = segment_number(path.name)
    if number is None:
        return None
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        header = unpack_segment_header(os.pread(file.fileno(), SEGMENT_HEADER_BYTES, 0))
        if header is None:
            return None
        if header != (namespace, number):
            return Segment(path, number, [], size, foreign=True)
        entries = _read_index(file.fileno(), size)
        if entries is not None:
            return Segment(path, number, entries, size)
        entries, end = _scan(file.fileno(), size, shapes)
    if not entries:
        return None
    segment = Segment(path, number, entries, end)
    try:
        os.ftruncate(segment.open(), end)
        segment.seal()
    except OSError as error:
        # On a full disk it stays as it is: the next start looks at each record again.
        log.warning("disk tier: %s stays without its index: %s", path.name, error)
    finally:
        segment.close()
    return segment


def _read_index(descriptor: int, size: int) -> list[Entry] | None:
    trailer = unpack_trailer(os.pread(descriptor, TRAILER_BYTES, max(0, size - TRAILER_BYTES)), size)
    if trailer is None:
        return None
    _, offset = trailer
    data = os.pread(descriptor, size - offset, offset)
    return unpack_index(data) if len(data) == size - offset else None


def _scan(descriptor: int, size: int, shapes: Mapping[int, RecordShape]) -> tuple[list[Entry], int]:
    """The whole records from the start, and where they end."""
    entries: list[Entry] = []
    offset = SEGMENT_HEADER_BYTES
    longest = max(shape.header_bytes for shape in shapes.values())
    while True:
        data = os.pread(descriptor, longest, offset)
        group = RecordShape.group_of(data)
        shape = shapes.get(group) if group is not None else None
        if shape is None:
            return entries, offset
        found = shape.unpack(data[: shape.header_bytes])
        if found is None or offset + shape.record_bytes > size:
            return entries, offset
        entries.append((shape.group, found[0], offset))
        offset += shape.record_bytes


def _write_all(descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Write every buffer in turn at ``offset``; returns bytes written. Raises OSError."""
    pending = [memoryview(b) for b in buffers]
    start = offset
    while pending:
        written = os.pwritev(descriptor, pending[:512], offset)
        offset += written
        while pending and written >= pending[0].nbytes:
            written -= pending.pop(0).nbytes
        if written:
            pending[0] = pending[0][written:]
    return offset - start
