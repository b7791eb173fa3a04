"""Copies pages between a rank's device pool and the host region, both plain memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.engine.cache.actions import PageMapping
from forebay.engine.cache.host.region import HostRegion
from forebay.engine.cache.interface import DeviceBuffers
from forebay.engine.cache.transfer.page_layout import group_layouts
from forebay.kv.spec import KVSpec

__all__ = ["CopyRuns", "PageCopier", "copy_rows", "native_copy_runs"]

Bytes2D = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
CopyRuns = Callable[[Int64Array, Int64Array, int], None]
"""copy(targets, sources, nbytes): for each i, ``nbytes`` bytes from address sources[i] to address targets[i]. It must
release the interpreter lock."""


def native_copy_runs(function: Callable[..., object]) -> CopyRuns:
    """The native library's ``fb_copy_runs`` as a CopyRuns; ctypes releases the interpreter lock."""

    def copy(targets: Int64Array, sources: Int64Array, nbytes: int) -> None:
        assert targets.flags.c_contiguous, "addresses must be contiguous"
        assert sources.flags.c_contiguous, "addresses must be contiguous"
        function(targets.ctypes.data, sources.ctypes.data, targets.size, nbytes)

    return copy


def copy_rows(target: Bytes2D, target_rows: list[int], source: Bytes2D, source_rows: list[int]) -> None:
    """target[t] = source[s] for each pair of rows, with numpy: consecutive rows as slices, scattered ones by index.

    numpy releases the interpreter lock for both.
    """
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
class _Strip:
    """One part of one layer in both memories: a row per page."""

    device: Bytes2D
    host: Bytes2D
    writes: bool
    """This rank is the one that copies it to the host."""


class _EqualStrips:
    """Strips with rows of one length, by address: where each one's page 0 is, and the distance from page to page."""

    __slots__ = ("device_bases", "device_stride", "host_bases", "host_stride", "nbytes")

    def __init__(self, strips: list[_Strip]) -> None:
        self.nbytes = int(strips[0].device.shape[1])
        self.device_bases = np.array([strip.device.ctypes.data for strip in strips], dtype=np.int64)
        self.host_bases = np.array([strip.host.ctypes.data for strip in strips], dtype=np.int64)
        self.device_stride = strips[0].device.strides[0]
        self.host_stride = strips[0].host.strides[0]

    def addresses(self, pages: _PageNumbers) -> tuple[Int64Array, Int64Array]:
        """(device, host) of every strip's row of every page; the rows of a page are next to each other."""
        device = pages.device * self.device_stride + self.device_bases
        host = pages.host * self.host_stride + self.host_bases
        return device.reshape(-1), host.reshape(-1)


class _PageNumbers(threading.local):
    """The page numbers of the mapping that this thread copies, as columns: the same for each of its layers."""

    mapping: PageMapping | None = None
    device: Int64Array
    host: Int64Array

    def set(self, mapping: PageMapping) -> None:
        if mapping is not self.mapping:
            self.mapping = mapping
            self.device = np.array(mapping.device_pages, dtype=np.int64)[:, None]
            self.host = np.array(mapping.host_pages, dtype=np.int64)[:, None]


class _Strips:
    """The strips of one layer, or of a whole page, to be copied in either direction."""

    def __init__(self, strips: list[_Strip], copy_runs: CopyRuns | None, pages: _PageNumbers) -> None:
        self._strips = strips
        self._pages = pages
        self._copy_runs = copy_runs
        self._page_bytes = sum(int(strip.device.shape[1]) for strip in strips)
        lengths = sorted({strip.device.shape[1] for strip in strips})
        self._by_length = [_EqualStrips([s for s in strips if s.device.shape[1] == length]) for length in lengths]

    def copy(self, mapping: PageMapping, *, to_host: bool) -> int:
        """Copy the mapping's pages; returns bytes."""
        if self._copy_runs is not None:
            self._pages.set(mapping)
            for equal in self._by_length:
                device, host = equal.addresses(self._pages)
                self._copy_runs(host if to_host else device, device if to_host else host, equal.nbytes)
        else:
            device_rows, host_rows = list(mapping.device_pages), list(mapping.host_pages)
            for strip in self._strips:
                if to_host:
                    copy_rows(strip.host, host_rows, strip.device, device_rows)
                else:
                    copy_rows(strip.device, device_rows, strip.host, host_rows)
        return len(mapping.device_pages) * self._page_bytes


class PageCopier:
    """Copies one rank's heads of pages. Called from transfer threads. Copies are complete when the calls return.

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
        self._loads: list[dict[int, _Strips]] = []
        """By group, then by the model's layer."""
        self._backups: list[_Strips] = []
        """By group: what this rank copies to the host, all layers."""
        pages = _PageNumbers()
        for group, layout in enumerate(group_layouts(spec, rank, tp)):
            layers: dict[int, list[_Strip]] = {}
            for index, layer in enumerate(layout.layers):
                layers[layer] = []
                for part, heads in enumerate(layout.slices):
                    assert buffers.page_stride(group, part) == heads.nbytes, "the device pool has another page layout"
                    device = _view(buffers.address(group, index, part), buffers.num_pages(group), heads.nbytes)
                    start = index * layout.layer_bytes + heads.offset
                    host = region.pages(group)[:, start : start + heads.nbytes]
                    layers[layer].append(_Strip(device, host, heads.writes))
            self._loads.append({layer: _Strips(strips, copy_runs, pages) for layer, strips in layers.items()})
            written = [strip for strips in layers.values() for strip in strips if strip.writes]
            self._backups.append(_Strips(written, copy_runs, pages))

    def back_up(self, mapping: PageMapping) -> int:
        """Copy this rank's heads of the device pages to the host pages; returns bytes written."""
        return self._backups[mapping.group].copy(mapping, to_host=True)

    def load_layer(self, mapping: PageMapping, layer: int) -> int:
        """Copy ``layer`` (the model's number) of the host pages to the device pages; returns bytes.

        0 bytes if the group has no such layer.
        """
        strips = self._loads[mapping.group].get(layer)
        return 0 if strips is None else strips.copy(mapping, to_host=False)


def _view(address: int, rows: int, nbytes: int) -> Bytes2D:
    """The memory at ``address`` as (rows, nbytes). The runner keeps it alive for the server's life."""
    memory = (ctypes.c_uint8 * (rows * nbytes)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(rows, nbytes)
