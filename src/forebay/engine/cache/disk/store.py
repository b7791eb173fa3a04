"""The disk tier: content-addressed pages in append-only segment files, evicted one segment at a time.

Threads: one writes (``write``), one reads (``read``), the cache's own thread asks (``has``) and clears. Looking an
address up takes no lock; everything that changes the index does.

Durability: the kernel has a page when ``write`` returns, so a killed server loses only the pages that it was writing.
What a power cut loses is decided by the fsync policy. Nothing that is read back is used unless its checksum is right.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any

import xxhash

from forebay.engine.cache.actions import DiskPage
from forebay.engine.cache.config import FsyncPolicy
from forebay.engine.cache.disk.folder_lock import take_folder
from forebay.engine.cache.disk.format import RecordShape
from forebay.engine.cache.disk.segment import Entry, Segment
from forebay.engine.cache.disk.segment_table import SegmentTable
from forebay.engine.cache.radix.page_hash import namespace_digest
from forebay.errors import UsageError
from forebay.kv.spec import KVSpec
from forebay.sizes import format_size

__all__ = ["DiskStore"]

log = logging.getLogger(__name__)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
"""Deleting files of one's own helps against these."""
_FULL = {*_NO_SPACE, errno.EFBIG}


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
            is treated as the call's own failure. For tests that inject faults.
        retry_s: pause after the disk was full or failed.
        clock: seconds, for the pause.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.budget = budget
        self.namespace = namespace_digest(fingerprint, spec)
        self.shapes = {
            g: RecordShape(g, len(group.layers), spec.page_bytes(g) // len(group.layers), 4 * spec.page_size)
            for g, group in enumerate(spec.groups)
        }
        self._segment_bytes = self._segment_size(segment_bytes)
        self._fsync = fsync
        self._before = before
        self._retry_s = retry_s
        self._clock = clock
        self._write_lock = Lock()
        self._paused_until = clock()
        self._paused_why = ""
        self._table = SegmentTable(folder, self.namespace, self.shapes)
        with ExitStack() as undo:
            self._lock_file = take_folder(folder)
            undo.callback(os.close, self._lock_file)
            started = time.perf_counter()
            try:
                self._table.rebuild()
                self._keep_budget(0)
            except OSError as error:
                raise UsageError(
                    f"disk cache: cannot use {folder}: {error}", fix="check the folder and its owner"
                ) from error
            self.rebuild_s = time.perf_counter() - started
            undo.pop_all()

    def _segment_size(self, wanted: int) -> int:
        """At least one page, at most an eighth of the budget, and no more than this process may write to one file."""
        largest_page = max(shape.record_bytes for shape in self.shapes.values())
        file_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = max(largest_page, min(wanted, self.budget // 8))
        return size if file_limit == resource.RLIM_INFINITY else min(size, file_limit)

    # -- questions ------------------------------------------------------------------------------------------------

    def has(self, group: int, key: bytes) -> bool:
        """True if the page is on disk (and was good when last read)."""
        return self._table.has(group, key)

    def num_pages(self, group: int) -> int:
        """Pages of ``group`` on disk."""
        return self._table.num_pages(group)

    @property
    def counts(self) -> Counter[str]:
        """Drops by reason, segments evicted, pauses."""
        return self._table.counts

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments."""
        with self._table.lock:
            return self._table.used_bytes

    @property
    def paused(self) -> str:
        """Why nothing is written at present; empty while pages are written."""
        return self._paused_why if self._clock() < self._paused_until else ""

    def state(self) -> dict[str, Any]:
        """For GET /cache."""
        with self._table.lock:
            segments = self._table.segments.values()
            return {
                "folder": str(self.folder),
                "state": f"paused: {self.paused}" if self.paused else "writing",
                "segments": len(segments),
                "used_bytes": self._table.used_bytes,
                "other_models_bytes": sum(s.end for s in segments if s.foreign),
                "budget_bytes": self.budget,
                "pages": [self._table.num_pages(group) for group in self.shapes],
                "fsync": self._fsync.value,
                "rebuild_s": self.rebuild_s,
                "counts": dict(self.counts),
            }

    # -- writing --------------------------------------------------------------------------------------------------

    def write(self, pages: Sequence[DiskPage], payloads: Sequence[memoryview]) -> list[tuple[int, str]]:
        """Append pages; returns (index, why) for those that were not. A page that is there already is left alone.

        When the disk is full because others fill it, segments used longest ago are deleted to go on. When that does not
        help, because there are none or because others take what becomes free, the tier pauses.
        """
        with self._write_lock:
            return self._write(pages, payloads)

    def _write(self, pages: Sequence[DiskPage], payloads: Sequence[memoryview]) -> list[tuple[int, str]]:
        if self.paused:
            return [(i, "disk_paused") for i in range(len(pages))]
        needed = sum(self.shapes[page.group].record_bytes for page in pages)
        may_give_up = 2 * (needed + self._segment_bytes)
        start = 0
        while start < len(pages):
            try:
                start += self._append_some(pages[start:], payloads[start:])
            except OSError as error:
                freed = self._give_up_segment(error) if may_give_up > 0 else 0
                may_give_up -= freed
                if not freed:
                    reason = self._pause(error)
                    return [(i, reason) for i in range(start, len(pages))]
        try:
            if self._fsync is FsyncPolicy.ALWAYS and self._table.appending is not None:
                self._table.appending.sync()
        except OSError as error:
            self._pause(error)
        return []

    def _append_some(self, pages: Sequence[DiskPage], payloads: Sequence[memoryview]) -> int:
        """Append the first pages, as many as the segment takes; returns how many are done. Raises OSError."""
        self._before("disk_write")
        shape = self.shapes[pages[0].group]
        segment = self._writable(shape.record_bytes)
        buffers: list[bytes | memoryview] = []
        entries: list[Entry] = []
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
        with self._table.lock:
            self._table.add(segment, entries)
            self._table.touch([segment])
        return count

    def _writable(self, more: int) -> Segment:
        """The segment to append to, with room for ``more`` bytes. Raises OSError."""
        current = self._table.appending
        if current is not None and current.path.exists() and current.end + more <= self._segment_bytes:
            return current
        self._retire_current()
        with self._table.lock:
            self._table.forget_deleted()
            self._keep_budget(self._segment_bytes)
            self._table.appending = segment = self._table.create()
        return segment

    def _keep_budget(self, more: int) -> None:
        """Evict until ``more`` bytes fit the budget. Raises OSError."""
        while self._table.used_bytes + more > self.budget and self._table.evict():
            pass

    def _retire_current(self) -> None:
        """Stop appending to the current segment. On a full disk it stays without its index;
        its records are still found.
        """
        current = self._table.appending
        if current is not None and current.entries:
            try:
                current.seal()
                if self._fsync is not FsyncPolicy.NEVER:
                    current.sync()
            except OSError as error:
                log.warning("disk tier: %s stays without its index: %s", current.path.name, error)
        self._table.appending = None

    def _give_up_segment(self, error: OSError) -> int:
        """Delete the segment used longest ago because the disk is full; returns bytes freed, 0 where that cannot help.

        The current segment is never deleted here. When it is the only one, it is retired, so that a later write that
        finds the disk still full can replace it.
        """
        if error.errno not in _NO_SPACE:
            return 0
        try:
            with self._table.lock:
                freed = self._table.evict()
        except OSError as failure:
            log.warning("disk tier: the disk is full, and a segment cannot be deleted: %s", failure)
            return 0
        if not freed:
            self._retire_current()
            return 0
        self.counts["segments_given_up"] += 1
        log.warning("disk tier: %s is full: deleted a segment of %s to go on", self.folder, format_size(freed))
        return freed

    def _pause(self, error: OSError) -> str:
        """Write nothing for a while; returns the reason for the drop counters."""
        reason = "disk_full" if error.errno in _FULL else "disk_write_error"
        self._paused_why = f"{reason}: {error.strerror or error}"
        self._paused_until = self._clock() + self._retry_s
        self.counts["pauses"] += 1
        log.warning("disk tier paused for %.0f s: %s (%s)", self._retry_s, error, self.folder)
        if reason == "disk_write_error":
            # A file that failed is not written to again; what it holds is still checked when read.
            self._table.appending = None
        return reason

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, pages: Sequence[DiskPage], targets: Sequence[memoryview]) -> list[tuple[int, str]]:
        """Fill ``targets``, in the order of the files; returns (index, why) for pages that are bad.

        A record is read whole: the kernel reads ahead of a file that is read in order. Any other order that was tried
        (the first layers first, for example) cost more than it hid. A bad page leaves the index; the others are read
        all the same.
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
        """For each page (a duplicate of the segment's descriptor, offset of the record).
        The caller closes duplicates.
        """
        files: dict[int, tuple[int, int]] = {}
        opened: dict[Segment, int] = {}
        with self._table.lock:
            for i, page in enumerate(pages):
                place = self._table.place(page.group, page.key)
                if place is None:
                    bad[i] = "disk_gone"
                    continue
                segment, offset = place
                if segment not in opened:
                    try:
                        opened[segment] = os.dup(self._table.descriptor(segment))
                    except OSError as error:
                        bad[i] = "disk_file_deleted" if error.errno == errno.ENOENT else "disk_read_error"
                        continue
                files[i] = opened[segment], offset
            self._table.touch(list(opened))
        return files

    def _drop(self, pages: Sequence[DiskPage], bad: dict[int, str]) -> None:
        """Forget bad pages; with a deleted file all of its pages are forgotten."""
        if not bad:
            return
        with self._table.lock:
            for i, why in bad.items():
                segment = self._table.drop_page(pages[i].group, pages[i].key)
                self.counts[why] += 1
                if segment is not None and why == "disk_file_deleted":
                    self._table.forget(segment, why)
                    segment.close()
        log.warning("disk tier: %d pages could not be read back: %s", len(bad), dict(Counter(bad.values())))

    # -- the whole ------------------------------------------------------------------------------------------------

    def clear(self) -> int:
        """Delete this model's pages; returns how many there were."""
        with self._write_lock, self._table.lock:
            count = sum(self._table.num_pages(group) for group in self.shapes)
            self._table.appending = None
            for segment in [s for s in self._table.segments.values() if not s.foreign]:
                self._table.forget(segment, "flushed")
                segment.delete()
            return count

    def close(self) -> None:
        """Seal the current segment and release the folder."""
        with self._write_lock, self._table.lock:
            self._retire_current()
            for segment in self._table.segments.values():
                segment.close()
        os.close(self._lock_file)

    def check(self) -> None:
        """Raise AssertionError when the index and the segments disagree."""
        with self._table.lock:
            self._table.check()
