"""Reading records back: all pages of a request side by side, a block of layers at a time, checking every layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import xxhash

from forebay.engine.cache.actions import DiskPage
from forebay.engine.cache.disk_format import RecordShape

__all__ = ["RecordReader"]

_BLOCK_BYTES = 128 * 1024
"""A page's part of a block is at least this long: shorter reads cost more in calls than they win in waiting."""


class RecordReader:
    """One read of several pages.

    Args:
        pages: what is wanted.
        targets: where each page goes.
        files: index into pages -> (descriptor, offset of the record); pages without an entry are known to be bad.
        shapes: each group's records.
        layers: each group's layers, in the model's numbering.
        before: called before each system call; what it raises counts as that call's failure.
    """

    def __init__(
        self,
        pages: Sequence[DiskPage],
        targets: Sequence[memoryview],
        files: Mapping[int, tuple[int, int]],
        shapes: Mapping[int, RecordShape],
        layers: Sequence[Sequence[int]],
        before: Callable[[str], None],
    ) -> None:
        self._pages = pages
        self._targets = targets
        self._files = files
        self._shapes = shapes
        self._layers = layers
        self._before = before
        self._sums: dict[int, tuple[int, ...]] = {}

    def read(self, bad: dict[int, str], arrived: Callable[[int], None]) -> None:
        """Fill the targets; add to ``bad`` why a page is not good; say what has ``arrived`` (see DiskStore.read)."""
        for i, (descriptor, offset) in self._files.items():
            size = self._shapes[self._pages[i].group].record_bytes
            # The kernel starts reading everything in order now; the blocks below then find it in memory.
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        for i in self._files:
            if why := self._read_header(i):
                bad[i] = why
        if bad:
            arrived(-1)
        num_layers = 1 + max(max(layers) for layers in self._layers)
        step = max(1, -(-_BLOCK_BYTES // max(shape.layer_bytes for shape in self._shapes.values())))
        for first in range(0, num_layers, step):
            stop = min(num_layers, first + step)
            for i in range(len(self._pages)):
                if i not in bad and (why := self._read_layers(i, first, stop)):
                    bad[i] = why
            arrived(-1 if bad else stop)

    def _read_header(self, i: int) -> str:
        """Learn page ``i``'s layer checksums; returns why it is bad, or nothing."""
        page = self._pages[i]
        shape = self._shapes[page.group]
        descriptor, offset = self._files[i]
        try:
            self._before("disk_read")
            found = shape.unpack(os.pread(descriptor, shape.header_bytes, offset))
        except OSError:
            return "disk_read_error"
        if found is None or found[:2] != (page.key, page.tokens):
            return "disk_checksum"
        self._sums[i] = found[2]
        return ""

    def _read_layers(self, i: int, first: int, stop: int) -> str:
        """Read page ``i``'s layers among the model's ``first`` .. ``stop`` - 1; returns why it is bad, or nothing."""
        page, target = self._pages[i], self._targets[i]
        shape = self._shapes[page.group]
        inside = [n for n, layer in enumerate(self._layers[page.group]) if first <= layer < stop]
        if not inside:
            return ""
        size = shape.layer_bytes
        start, end = inside[0] * size, (inside[-1] + 1) * size
        descriptor, offset = self._files[i]
        try:
            self._before("disk_read")
            count = os.preadv(descriptor, [target[start:end]], offset + shape.header_bytes + start)
        except OSError:
            return "disk_read_error"
        if count != end - start:
            return "disk_checksum"
        sums = self._sums[i]
        for n in inside:
            if xxhash.xxh3_64_intdigest(target[n * size : (n + 1) * size]) != sums[n]:
                return "disk_checksum"
        return ""
