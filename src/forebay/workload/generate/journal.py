"""The journal: an append-only file of checksummed lines, the only durable state of a run.

A line is ``crc32 (8 hex digits) SP json LF``. A record counts when its line is complete and its checksum is right; a
file cut at any byte therefore holds the records before the cut. Records:

    turn     {"k": key, "t": n, "b": digest of the answers before it, "c": content, "r": reasoning, "f": finish reason,
              "p","o","h": prompt, output, cached tokens, "g": filters that matched, "n": attempts,
              "e": "ok" | "rejected" when it is the row's last, "w": why}
    failure  {"k": key, "e": "failed", "w": why}

Durability: ``append`` writes the line to the kernel before it returns, so a killed process loses nothing that it
appended. ``sync`` writes it to disk; the job calls it again and again on a thread, at most every 50 ms, and counts a
turn as finished only then. A machine that stops therefore costs the turns in flight and those since the last sync.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import DeadError

__all__ = ["Journal", "Record", "RepairReport", "decode_line", "history_digest", "read_turns", "scan"]

_PREFIX = 9  # 8 hex digits and a space
_READ_BYTES = 1 << 20


class Record(msgspec.Struct, omit_defaults=True):
    """One journal record; field names are short because there are tens of millions of them (see the module's text)."""

    k: str
    t: int = -1
    b: str = ""
    c: str = ""
    r: str | None = None
    f: str | None = None
    p: int = 0
    o: int = 0
    h: int = 0
    g: list[str] = []
    n: int = 1
    e: str | None = None
    w: str | None = None


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What was wrong when the journal was opened: bytes of an incomplete last line, which are cut off, and damaged
    lines.
    """

    torn_bytes: int
    damaged_lines: int


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)


def history_digest(before: str, content: str) -> str:
    """The digest of the answers so far: of those ``before``, then ``content``. With no answers it is the empty text."""
    data = before.encode("ascii") + content.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def encode_line(record: Record) -> bytes:
    """The line of a record, checksum and newline included."""
    body = _ENCODER.encode(record)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def decode_line(line: bytes) -> Record | None:
    """The record of a line without its newline, or None when the line is damaged."""
    body = line[_PREFIX:]
    if line[:_PREFIX] != b"%08x " % zlib.crc32(body):
        return None
    try:
        return _DECODER.decode(body)
    except (ValueError, msgspec.DecodeError):
        return None


def scan(path: Path, start: int = 0) -> Iterator[tuple[int, int, Record | None]]:
    """Every complete line of a journal: offset, length without the newline, record (None when damaged).

    A last line without its newline is incomplete, or still being written, and is left out. Memory: one line.

    Args:
        start: the offset of the first line to read.
    """
    offset = start
    with path.open("rb", buffering=_READ_BYTES) as handle:
        handle.seek(start)
        for line in handle:
            if not line.endswith(b"\n"):
                return
            yield offset, len(line) - 1, decode_line(line[:-1])
            offset += len(line)


def read_turns(fd: int, key: bytes, places: Iterable[tuple[int, int]]) -> list[Record]:
    """Read the turns of one row again: offset and length of each, in turn order.

    Raises:
        DeadError: the bytes at one of these places are not that turn.
    """
    turns = []
    for number, (offset, length) in enumerate(places):
        record = decode_line(os.pread(fd, length, offset))
        if record is None or (record.k, record.t) != (key.hex(), number):
            raise DeadError(
                f"the journal was damaged while it was in use: byte {offset} is no longer turn {number + 1} of its row",
                fix="check the disk; the same command continues, and asks again for what is lost",
            )
        turns.append(record)
    return turns


class Journal:
    """An open journal, with one writer: the caller holds the job's lock.

    ``end`` is the size in bytes, always a line boundary. Only ``sync`` may be called from another thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repair = _repair(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.end = os.fstat(self._fd).st_size
        self.synced = self.end

    @property
    def fd(self) -> int:
        """For ``read_turns``."""
        return self._fd

    def append(self, record: Record) -> tuple[int, int]:
        """Write one record to the kernel; returns its offset and length.

        Raises:
            OSError: the disk is full or gone. A part that was written is cut off again.
        """
        line = encode_line(record)
        offset = self.end
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            os.ftruncate(self._fd, offset)
            raise
        self.end = offset + len(line)
        return offset, len(line) - 1

    def sync(self) -> int:
        """Write everything appended so far to disk; returns the offset up to which the journal is on disk."""
        upto = self.end
        if upto > self.synced:
            os.fdatasync(self._fd)
            self.synced = upto
        return upto

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        os.close(self._fd)


def _repair(path: Path) -> RepairReport:
    """Cut off an incomplete last line, and count damaged lines; they stay in the file, and every reader skips them."""
    if not path.exists():
        return RepairReport(0, 0)
    whole = damaged = 0
    for offset, length, record in scan(path):
        whole = offset + length + 1
        damaged += record is None
    torn = path.stat().st_size - whole
    if torn:
        os.truncate(path, whole)
    return RepairReport(torn, damaged)
