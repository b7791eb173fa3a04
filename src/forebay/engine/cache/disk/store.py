"""The disk tier's files: content-addressed pages in append-only segments, evicted a segment at a time.

Threads: one writes (``write``), one reads (``read``), the cache's own thread asks (``has``) and clears. Looking an
address up takes no lock; everything that changes the index does.

Durability: a page is in the kernel's hands when ``write`` returns, so a killed server loses only what it was writing;
what a power cut loses is the fsync policy's business. Nothing read back is believed without its checksum.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from forebay.engine.cache.actions import DiskPage
from forebay.engine.cache.config import FsyncPolicy
from forebay.engine.cache.disk.folder_lock import take_folder
from forebay.engine.cache.disk.format import RecordShape
from forebay.engine.cache.disk.segment import Segment, open_segment, segment_number
from forebay.engine.cache.radix.page_hash import root_digest
from forebay.kv.spec import KVSpec

__all__ = ["DiskStore"]

log = logging.getLogger(__name__)

_OFFSET_BITS = 44
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OPEN_FILES = 64


class DiskStore:
    """Pages on disk.

    Args:
        folder: made if missing, readable by its owner only (pages hold what users said).
        budget: bytes of all segments together, other models' included.
        spec: what a page is.
        fingerprint: names the model's weights and dtype.
        segment_bytes: size at which a segment is sealed.
        fsync: when to force files to the medium.
        before: called with ``"disk_write"`` or ``"disk_read"`` before each system call that moves pages; what it raises
            is taken for the call's own failure. A seam for injected faults.
        retry_s: pause after the disk was full or failed.

    Raises:
        RefusedError: another server holds the folder.
        UsageError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        budget: int,
        spec: KVSpec,
        fingerprint: str,
        *,
        segment_bytes: int = 256 * 2**20,
        fsync: FsyncPolicy = FsyncPolicy.NEVER,
        before: Callable[[str], None] = lambda point: None,
        retry_s: float = 5.0,
    ) -> None:
        self.folder = folder
        self.budget = budget
        self.salt = root_digest(fingerprint, spec)
        self.shapes = {
            g: RecordShape(g, len(group.layers), spec.page_bytes(g) // len(group.layers), 4 * spec.page_size)
            for g, group in enumerate(spec.groups)
        }
        largest_page = max(shape.record_bytes for shape in self.shapes.values())
        self._segment_bytes = max(largest_page, min(segment_bytes, budget // 8))
        self._fsync = fsync
        self._before = before
        self._retry_s = retry_s
        self._lock = threading.RLock()
        self._write_lock = threading.Lock()
        self._index: list[dict[bytes, int]] = [{} for _ in spec.groups]
        self._segments: dict[int, Segment] = {}
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._current: Segment | None = None
        self._tick = 0
        self._paused_until = 0.0
        self._paused_why = ""
        self.counts: Counter[str] = Counter()
        """Drops by reason, segments evicted, pauses."""
        self._lock_file = take_folder(folder)
        started = time.perf_counter()
        self._rebuild()
        self.rebuild_s = time.perf_counter() - started

    # -- questions ------------------------------------------------------------------------------------------------

    def has(self, group: int, key: bytes) -> bool:
        """True if the page is on disk (and was good when last looked at)."""
        return key in self._index[group]

    def num_pages(self, group: int) -> int:
        """Pages of ``group`` on disk."""
        return len(self._index[group])

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return sum(segment.end for segment in self._segments.values())

    @property
    def paused(self) -> str:
        """Why nothing is being written just now; empty: it is."""
        return self._paused_why if time.monotonic() < self._paused_until else ""

    def state(self) -> dict[str, Any]:
        """For GET /cache."""
        with self._lock:
            foreign = sum(s.end for s in self._segments.values() if s.foreign)
            return {
                "folder": str(self.folder),
                "state": f"paused: {self.paused}" if self.paused else "writing",
                "segments": len(self._segments),
                "used_bytes": self.used_bytes,
                "other_models_bytes": foreign,
                "budget_bytes": self.budget,
                "pages": [len(index) for index in self._index],
                "fsync": self._fsync.value,
                "rebuild_s": self.rebuild_s,
                "counts": dict(self.counts),
            }

    # -- writing --------------------------------------------------------------------------------------------------

    def write(self, pages: Sequence[DiskPage], payloads: Sequence[memoryview]) -> list[tuple[int, str]]:
        """Append pages; returns (index, why) for those that were not. A page that is there already is left alone."""
        with self._write_lock:
            return self._write(pages, payloads)

    def _write(self, pages: Sequence[DiskPage], payloads: Sequence[memoryview]) -> list[tuple[int, str]]:
        if self.paused:
            return [(i, "disk_paused") for i in range(len(pages))]
        start = 0
        while start < len(pages):
            try:
                start += self._append_some(pages[start:], payloads[start:])
            except OSError as error:
                reason = self._write_failed(error)
                return [(i, reason) for i in range(start, len(pages))]
        try:
            if self._fsync is FsyncPolicy.ALWAYS and self._current is not None:
                self._current.sync()
        except OSError as error:
            self._write_failed(error)
        return []

    def _append_some(self, pages: Sequence[DiskPage], payloads: Sequence[memoryview]) -> int:
        """Append the first pages, as many as the segment takes; returns how many are done. Raises OSError."""
        self._before("disk_write")
        shape = self.shapes[pages[0].group]
        segment = self._writable(shape.record_bytes)
        buffers: list[bytes | memoryview] = []
        entries: list[tuple[int, bytes, int]] = []
        offset, count = segment.end, 0
        for page, payload in zip(pages, payloads):
            shape = self.shapes[page.group]
            if offset + shape.record_bytes > self._segment_bytes and entries:
                break
            count += 1
            if self.has(page.group, page.key):
                continue
            buffers += [shape.pack(page.key, page.tokens, payload), payload]
            entries.append((page.group, page.key, offset))
            offset += shape.record_bytes
        segment.append(buffers, entries)
        with self._lock:
            for group, key, where in entries:
                self._index[group][key] = segment.number << _OFFSET_BITS | where
            self._tick += 1
            segment.last_used = self._tick
        return count

    def _writable(self, more: int) -> Segment:
        """The segment to append to, with room for ``more`` bytes. Raises OSError."""
        current = self._current
        if current is not None and current.end + more <= self._segment_bytes:
            return current
        if current is not None:
            current.seal()
            if self._fsync is not FsyncPolicy.NEVER:
                current.sync()
            self._current = None
        with self._lock:
            self._forget_deleted()
            while self._segments and self.used_bytes + self._segment_bytes > self.budget:
                self._evict_segment()
            number = 1 + max(self._segments, default=0)
            while (self.folder / f"segment-{number:012d}.kv").exists():
                number += 1
            self._current = self._segments[number] = Segment.create(self.folder, number, self.salt)
            self._keep_open(self._current)
        return self._current

    def _evict_segment(self) -> None:
        """Delete the segment that was hit longest ago; other models' go first."""
        number = min(self._segments, key=lambda n: (self._segments[n].last_used, n))
        segment = self._segments[number]
        self._forget(segment, "evicted")
        segment.delete()
        self.counts["segments_evicted"] += 1

    def _write_failed(self, error: OSError) -> str:
        reason = "disk_full" if error.errno in _FULL else "disk_write_error"
        self._paused_why = f"{reason}: {error.strerror or error}"
        self._paused_until = time.monotonic() + self._retry_s
        self.counts["pauses"] += 1
        log.warning("disk tier paused for %.0f s: %s (%s)", self._retry_s, error, self.folder)
        if reason == "disk_write_error":
            # A file that failed is not written to again; what it holds is still checked when read.
            self._current = None
        return reason

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, pages: Sequence[DiskPage], targets: Sequence[memoryview]) -> list[tuple[int, str]]:
        """Fill ``targets``, in the order of the files; returns (index, why) for pages that are bad.

        A record is read whole: the kernel reads ahead of a file that is read in order, and any other order, layers
        first for example, has cost more than it hid. A bad page leaves the index; the others are read all the same.
        """
        bad: dict[int, str] = {}
        files = self._locate(pages, bad)
        try:
            for i, (descriptor, offset) in sorted(files.items(), key=lambda item: item[1]):
                if why := self._read_record(pages[i], descriptor, offset, targets[i]):
                    bad[i] = why
        finally:
            for descriptor in {descriptor for descriptor, _ in files.values()}:
                os.close(descriptor)
        self._drop(pages, bad)
        return sorted(bad.items())

    def _read_record(self, page: DiskPage, descriptor: int, offset: int, target: memoryview) -> str:
        """Read one page into ``target``; returns why it is bad, or nothing."""
        shape = self.shapes[page.group]
        header = bytearray(shape.header_bytes)
        try:
            self._before("disk_read")
            count = os.preadv(descriptor, [header, target], offset)
        except OSError:
            return "disk_read_error"
        found = shape.unpack(bytes(header)) if count == shape.record_bytes else None
        if found != (page.key, page.tokens, xxhash.xxh3_64_intdigest(target)):
            return "disk_checksum"
        return ""

    def _locate(self, pages: Sequence[DiskPage], bad: dict[int, str]) -> dict[int, tuple[int, int]]:
        """For each page (descriptor of our own, offset of its record)."""
        files: dict[int, tuple[int, int]] = {}
        opened: dict[int, int] = {}
        with self._lock:
            self._tick += 1
            for i, page in enumerate(pages):
                where = self._index[page.group].get(page.key)
                if where is None:
                    bad[i] = "disk_gone"
                    continue
                number, offset = where >> _OFFSET_BITS, where & ((1 << _OFFSET_BITS) - 1)
                if number not in opened:
                    segment = self._segments[number]
                    try:
                        opened[number] = os.dup(segment.open())
                    except OSError as error:
                        bad[i] = "disk_file_deleted" if error.errno == errno.ENOENT else "disk_read_error"
                        continue
                    segment.last_used = self._tick
                    self._keep_open(segment)
                files[i] = opened[number], offset
        used = {descriptor for descriptor, _ in files.values()}
        for descriptor in set(opened.values()) - used:
            os.close(descriptor)
        return files

    def _drop(self, pages: Sequence[DiskPage], bad: dict[int, str]) -> None:
        """Forget bad pages; a deleted file takes all its pages along."""
        if not bad:
            return
        with self._lock:
            for i, why in bad.items():
                where = self._index[pages[i].group].pop(pages[i].key, None)
                self.counts[why] += 1
                if where is not None and why == "disk_file_deleted":
                    self._forget(self._segments[where >> _OFFSET_BITS], why)
        log.warning("disk tier: %d pages could not be read back: %s", len(bad), dict(Counter(bad.values())))

    # -- segments -------------------------------------------------------------------------------------------------

    def clear(self) -> int:
        """Delete this model's pages; returns how many there were."""
        with self._write_lock, self._lock:
            count = sum(len(index) for index in self._index)
            for segment in [s for s in self._segments.values() if not s.foreign]:
                self._forget(segment, "flushed")
                segment.delete()
            return count

    def close(self) -> None:
        """Seal the current segment and give the folder up."""
        with self._write_lock, self._lock:
            if self._current is not None and self._current.entries:
                try:
                    self._current.seal()
                    if self._fsync is not FsyncPolicy.NEVER:
                        self._current.sync()
                except OSError as error:
                    log.warning("disk tier: the last segment stays unsealed: %s", error)
            for segment in self._segments.values():
                segment.close()
            self._current = None
        os.close(self._lock_file)

    def check(self) -> None:
        """Raise AssertionError when the index and the segments disagree."""
        with self._lock:
            for group, index in enumerate(self._index):
                for where in index.values():
                    segment = self._segments.get(where >> _OFFSET_BITS)
                    assert segment is not None, "the index points into a segment that is gone"
                    end = (where & ((1 << _OFFSET_BITS) - 1)) + self.shapes[group].record_bytes
                    assert end <= segment.end, "the index points behind the end of a segment"

    def _forget(self, segment: Segment, why: str) -> None:
        """Take a segment and its pages out of the index."""
        if segment is self._current:
            self._current = None
        del self._segments[segment.number]
        self._open.pop(segment.number, None)
        for group, key, _ in segment.entries:
            index = self._index[group]
            where = index.get(key)
            if where is not None and where >> _OFFSET_BITS == segment.number:
                del index[key]
                self.counts[f"pages_{why}"] += 1

    def _forget_deleted(self) -> None:
        """Notice segments that somebody deleted, so that their bytes are not counted."""
        for segment in list(self._segments.values()):
            if not segment.path.exists():
                self._forget(segment, "disk_file_deleted")
                segment.close()

    def _keep_open(self, segment: Segment) -> None:
        self._open[segment.number] = segment
        self._open.move_to_end(segment.number)
        while len(self._open) > _OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            if oldest is not self._current:
                oldest.close()

    def _rebuild(self) -> None:
        """Find what earlier servers left, oldest first, so that the newest copy of a page is the one that counts."""
        for path in sorted(self.folder.glob("segment-*.kv")):
            if segment_number(path.name) is None:
                continue
            try:
                segment = open_segment(path, self.salt, self.shapes)
                if segment is None:
                    path.unlink()
                    continue
            except OSError as error:
                log.warning("disk tier: cannot read %s: %s", path, error)
                self.counts["disk_read_error"] += 1
                continue
            self._segments[segment.number] = segment
            self._tick = max(self._tick, segment.number)
            for group, key, where in segment.entries:
                if group in self.shapes:
                    self._index[group][key] = segment.number << _OFFSET_BITS | where
        with self._lock:
            while self._segments and self.used_bytes > self.budget:
                self._evict_segment()
