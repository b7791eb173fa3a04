"""Reading records back: all pages of a request side by side, a block of layers at a time, each checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import xxhash

from forebay.engine.cache.actions import DiskPage
from forebay.engine.cache.disk_format import RecordShape

__all__ = ["RecordReader"]


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
        self._num_layers = 1 + max(max(group_layers) for group_layers in layers)
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
        blocks = self._blocks()
        for (_, group, block), after in zip(blocks, [first for first, _, _ in blocks[1:]] + [self._num_layers]):
            for i, page in enumerate(self._pages):
                if page.group == group and i not in bad and (why := self._read_block(i, block)):
                    bad[i] = why
            arrived(-1 if bad else after)

    def _blocks(self) -> list[tuple[int, int, int]]:
        """(the model's first layer of it, group, block) in the order in which layers are needed."""
        wanted = {page.group for page in self._pages}
        blocks = []
        for group in wanted:
            shape, layers = self._shapes[group], self._layers[group]
            blocks += [(layers[b * shape.block_layers], group, b) for b in range(shape.num_blocks)]
        return sorted(blocks)

    def _read_header(self, i: int) -> str:
        """Learn page ``i``'s checksums; returns why it is bad, or nothing."""
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

    def _read_block(self, i: int, block: int) -> str:
        """Read one block of layers of page ``i``; returns why it is bad, or nothing."""
        shape = self._shapes[self._pages[i].group]
        start = block * shape.block_bytes
        target = self._targets[i][start : start + shape.block_bytes]
        descriptor, offset = self._files[i]
        try:
            self._before("disk_read")
            count = os.preadv(descriptor, [target], offset + shape.header_bytes + start)
        except OSError:
            return "disk_read_error"
        if count != len(target) or xxhash.xxh3_64_intdigest(target) != self._sums[i][block]:
            return "disk_checksum"
        return ""
