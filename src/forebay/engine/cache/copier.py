"""How bytes move between a rank's device pool and the host region: the seam where CUDA is a back end.

``CpuCopier`` copies with plain memory copies and returns when they are done. A CUDA copier would enqueue
cudaMemcpyAsync on a stream of its own from and to the pinned region, record one event a layer, and wait for the event
in ``wait``; nothing else in the cache would change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forebay.engine.cache.actions import Piece
from forebay.engine.cache.host_region import HostRegion
from forebay.engine.cache.interface import DeviceBuffers
from forebay.engine.cache.layout import group_layouts
from forebay.planning.kv_spec import KVSpec

__all__ = ["Copier", "CopyRuns", "CpuCopier", "copy_runs_numpy"]

Bytes2D = npt.NDArray[np.uint8]
CopyRuns = Callable[["Bytes2D", list[int], "Bytes2D", list[int]], None]
"""copy(target, target rows, source, source rows): target[t] = source[s] for each pair of rows.

Both are (rows, nbytes) byte arrays with contiguous rows and any row stride; the native library may take their
addresses and strides. It must release the interpreter lock.
"""


class Copier(Protocol):
    """Moves one rank's share. Called from transfer threads, one call at a time a thread."""

    def back_up(self, piece: Piece) -> int:
        """Copy this rank's share of the device pages into the host pages; returns bytes written."""

    def load_layer(self, piece: Piece, layer: int) -> int:
        """Copy ``layer`` (the model's number) of the host pages into the device pages; 0 bytes if the group has no
        such layer."""

    def wait(self) -> None:
        """Return when everything asked for before is complete."""


def copy_runs_numpy(target: Bytes2D, target_rows: list[int], source: Bytes2D, source_rows: list[int]) -> None:
    """The portable way: runs of consecutive rows as slices, the rest by index (numpy releases the lock for both)."""
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


class CpuCopier:
    """Plain memory on both sides.

    Args:
        spec: what a page is.
        rank: this rank.
        tp: number of ranks.
        buffers: this rank's device pool.
        region: the node's host pages.
        copy_runs: the native library's copy, or the portable one.
    """

    def __init__(
        self,
        spec: KVSpec,
        rank: int,
        tp: int,
        buffers: DeviceBuffers,
        region: HostRegion,
        copy_runs: CopyRuns = copy_runs_numpy,
    ) -> None:
        self._copy = copy_runs
        self._layouts = group_layouts(spec, rank, tp)
        # By group, then by layer: (device rows, host rows, this rank writes it) for each part.
        self._arrays: list[dict[int, list[tuple[Bytes2D, Bytes2D, bool]]]] = []
        for group, layout in enumerate(self._layouts):
            layers: dict[int, list[tuple[Bytes2D, Bytes2D, bool]]] = {}
            for index, layer in enumerate(layout.layers):
                parts = []
                for part, share in enumerate(layout.shares):
                    assert buffers.page_stride(group, part) == share.nbytes, "the device pool has another page layout"
                    device = _view(buffers.address(group, index, part), buffers.num_pages(group), share.nbytes)
                    start = index * layout.layer_bytes + share.offset
                    parts.append((device, region.pages(group)[:, start : start + share.nbytes], share.writes))
                layers[layer] = parts
            self._arrays.append(layers)

    def back_up(self, piece: Piece) -> int:
        moved = 0
        device_rows, host_rows = list(piece.device_pages), list(piece.host_pages)
        for parts in self._arrays[piece.group].values():
            for device, host, writes in parts:
                if writes:
                    self._copy(host, host_rows, device, device_rows)
                    moved += len(host_rows) * device.shape[1]
        return moved

    def load_layer(self, piece: Piece, layer: int) -> int:
        moved = 0
        device_rows, host_rows = list(piece.device_pages), list(piece.host_pages)
        for device, host, _ in self._arrays[piece.group].get(layer, ()):
            self._copy(device, device_rows, host, host_rows)
            moved += len(host_rows) * device.shape[1]
        return moved

    def wait(self) -> None:
        """Copies are complete when they return."""


def _view(address: int, rows: int, nbytes: int) -> Bytes2D:
    """The memory at ``address`` as (rows, nbytes). The runner keeps it alive for the server's life."""
    memory = (ctypes.c_uint8 * (rows * nbytes)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(rows, nbytes)
