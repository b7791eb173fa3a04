"""How bytes move between a rank's device pool and the host region: the seam where CUDA is a back end.

``CpuCopier`` copies with plain memory copies and returns when they are done. A CUDA copier would enqueue
cudaMemcpyAsync on a stream of its own from and to the pinned region, record one event a layer, and wait for the event
in ``wait``; nothing else in the cache would change.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forebay.engine.cache.actions import PageMapping
from forebay.engine.cache.host.region import HostRegion
from forebay.engine.cache.interface import DeviceBuffers
from forebay.engine.cache.transfer.page_layout import group_layouts
from forebay.kv.spec import KVSpec

__all__ = ["Copier", "CopyRuns", "CpuCopier", "copy_rows", "native_copy_runs"]

Bytes2D = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
CopyRuns = Callable[[Int64Array, Int64Array, int], None]
"""copy(targets, sources, nbytes): for each i, ``nbytes`` bytes from address sources[i] to address targets[i]. It must
release the interpreter lock."""


class Copier(Protocol):
    """Moves one rank's share. Called from transfer threads, one call at a time a thread."""

    def back_up(self, piece: PageMapping) -> int:
        """Copy this rank's share of the device pages into the host pages; returns bytes written."""

    def load_layer(self, piece: PageMapping, layer: int) -> int:
        """Copy ``layer`` (the model's number) of the host pages into the device pages; 0 bytes if the group has no
        such layer."""

    def wait(self) -> None:
        """Return when everything asked for before is complete."""


def native_copy_runs(function: Callable[..., object]) -> CopyRuns:
    """The native library's ``fb_copy_runs`` (through ctypes, which releases the lock) as a CopyRuns."""

    def copy(targets: Int64Array, sources: Int64Array, nbytes: int) -> None:
        assert targets.flags.c_contiguous, "addresses must lie side by side"
        assert sources.flags.c_contiguous, "addresses must lie side by side"
        function(targets.ctypes.data, sources.ctypes.data, targets.size, nbytes)

    return copy


def copy_rows(target: Bytes2D, target_rows: list[int], source: Bytes2D, source_rows: list[int]) -> None:
    """target[t] = source[s] for each pair of rows, the portable way: runs of consecutive rows as slices, scattered ones
    by index. numpy releases the interpreter lock for both."""
    count = len(target_rows)
    if count > 8 and target_rows[-1] - target_rows[0] != count - 1:
        target[target_rows] = source[source_rows]
        return
    start = 0
    while start < count:
        stop = start + 1
        while (
            stop < count
            and target_rows[stop] == target_rows[stop - 1] + 1
            and source_rows[stop] == source_rows[stop - 1] + 1
        ):
            stop += 1
        first, origin, length = target_rows[start], source_rows[start], stop - start
        target[first : first + length] = source[origin : origin + length]
        start = stop


@dataclass(frozen=True, slots=True)
class _Run:
    """One part of one layer on both sides: a row a page."""

    device: Bytes2D
    host: Bytes2D
    writes: bool
    """This rank is the one that writes it to the host."""


class _Alike:
    """Runs of one length, by address: where each is in page 0, and how far it is from one page to the next."""

    __slots__ = ("device_bases", "device_stride", "host_bases", "host_stride", "nbytes")

    def __init__(self, runs: list[_Run]) -> None:
        self.nbytes = int(runs[0].device.shape[1])
        self.device_bases = np.array([run.device.ctypes.data for run in runs], dtype=np.int64)
        self.host_bases = np.array([run.host.ctypes.data for run in runs], dtype=np.int64)
        self.device_stride = runs[0].device.strides[0]
        self.host_stride = runs[0].host.strides[0]

    def addresses(self, pages: _Pages) -> tuple[Int64Array, Int64Array]:
        """(device, host) of every run of every page, a page's after each other."""
        device = pages.device * self.device_stride + self.device_bases
        host = pages.host * self.host_stride + self.host_bases
        return device.reshape(-1), host.reshape(-1)


class _Pages(threading.local):
    """The page numbers of the piece that this thread copies, as columns: the same for each of its layers."""

    piece: PageMapping | None = None
    device: Int64Array
    host: Int64Array

    def take(self, piece: PageMapping) -> None:
        if piece is not self.piece:
            self.piece = piece
            self.device = np.array(piece.device_pages, dtype=np.int64)[:, None]
            self.host = np.array(piece.host_pages, dtype=np.int64)[:, None]


class _Runs:
    """The runs of one layer (or of a whole page), to be copied either way."""

    def __init__(self, runs: list[_Run], copy_runs: CopyRuns | None, pages: _Pages) -> None:
        self._runs = runs
        self._pages = pages
        self._copy_runs = copy_runs
        self._page_bytes = sum(int(run.device.shape[1]) for run in runs)
        lengths = {run.device.shape[1] for run in runs}
        self._alike = [_Alike([run for run in runs if run.device.shape[1] == length]) for length in sorted(lengths)]

    def copy(self, piece: PageMapping, *, to_host: bool) -> int:
        """Move the piece's pages; returns bytes."""
        if self._copy_runs is not None:
            self._pages.take(piece)
            for alike in self._alike:
                device, host = alike.addresses(self._pages)
                self._copy_runs(host if to_host else device, device if to_host else host, alike.nbytes)
        else:
            device_rows, host_rows = list(piece.device_pages), list(piece.host_pages)
            for run in self._runs:
                if to_host:
                    copy_rows(run.host, host_rows, run.device, device_rows)
                else:
                    copy_rows(run.device, device_rows, run.host, host_rows)
        return len(piece.device_pages) * self._page_bytes


class CpuCopier:
    """Plain memory on both sides.

    Args:
        spec: what a page is.
        rank: this rank.
        tp: number of ranks.
        buffers: this rank's device pool.
        region: the node's host pages.
        copy_runs: the native library's copy; None: numpy's.
    """

    def __init__(
        self,
        spec: KVSpec,
        rank: int,
        tp: int,
        buffers: DeviceBuffers,
        region: HostRegion,
        copy_runs: CopyRuns | None = None,
    ) -> None:
        self._loads: list[dict[int, _Runs]] = []
        """By group, then by the model's layer."""
        self._backups: list[_Runs] = []
        """By group: what this rank writes, all layers."""
        pages = _Pages()
        for group, layout in enumerate(group_layouts(spec, rank, tp)):
            layers: dict[int, list[_Run]] = {}
            for index, layer in enumerate(layout.layers):
                layers[layer] = []
                for part, share in enumerate(layout.shares):
                    assert buffers.page_stride(group, part) == share.nbytes, "the device pool has another page layout"
                    device = _view(buffers.address(group, index, part), buffers.num_pages(group), share.nbytes)
                    start = index * layout.layer_bytes + share.offset
                    host = region.pages(group)[:, start : start + share.nbytes]
                    layers[layer].append(_Run(device, host, share.writes))
            self._loads.append({layer: _Runs(runs, copy_runs, pages) for layer, runs in layers.items()})
            written = [run for runs in layers.values() for run in runs if run.writes]
            self._backups.append(_Runs(written, copy_runs, pages))

    def back_up(self, piece: PageMapping) -> int:
        return self._backups[piece.group].copy(piece, to_host=True)

    def load_layer(self, piece: PageMapping, layer: int) -> int:
        runs = self._loads[piece.group].get(layer)
        return 0 if runs is None else runs.copy(piece, to_host=False)

    def wait(self) -> None:
        """Copies are complete when they return."""


def _view(address: int, rows: int, nbytes: int) -> Bytes2D:
    """The memory at ``address`` as (rows, nbytes). The runner keeps it alive for the server's life."""
    memory = (ctypes.c_uint8 * (rows * nbytes)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(rows, nbytes)
