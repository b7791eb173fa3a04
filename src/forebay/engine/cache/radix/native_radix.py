"""Operations on all pages of a prefix in C++ (native/native_radix.cpp), with a compiler and Python's headers.

Without them ``native_radix`` returns None, and the same is done in Python: same results, several times the time.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

from forebay.engine.cache.interface import Int32Array
from forebay.engine.cache.radix.node import CachedPage, Edge, Node
from forebay.engine.kernels.native.build import BuildError, build_extension

__all__ = ["FEW_PAGES", "NativeRadix", "native_radix"]

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).parent / "native" / "native_radix.cpp"
FEW_PAGES = 8
"""For so few pages a call costs more than it saves."""


class NativeRadix:
    """The library at ``path``. All functions take nodes of one layer group, from the root down, and lru queues."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.PyDLL(str(path))  # keeps the interpreter lock: it works on Python objects

        def function(name: str, *arguments: object) -> ctypes._FuncPointer:
            pointer = getattr(lib, name)
            pointer.argtypes, pointer.restype = list(arguments), ctypes.py_object
            return pointer  # type: ignore[no-any-return]

        py, size = ctypes.py_object, ctypes.c_ssize_t
        function("fb_radix_init", py, py)(Node, CachedPage)
        self._common_prefix_len = function("fb_radix_common_prefix_len", py, py, size, size, size, py)
        self.on_device = function("fb_radix_on_device", py)
        """(nodes) -> bool: every one has a device copy."""
        self.inc_lock_ref = function("fb_radix_inc_lock_ref", py, ctypes.c_int)
        """(nodes, has_host) -> how many copies left the device's queue and the host's queue."""
        self.dec_lock_ref = function("fb_radix_dec_lock_ref", py, py, py, py)
        """(nodes, now, the device queue's sentinel, the host queue's or None) -> how many copies entered each queue,
        and whether a node is left without any copy."""
        self._fill_table = function("fb_radix_fill_table", py, ctypes.c_void_p)

    def common_prefix_len(self, edge: Edge, data: bytes, start: int, stop: int, step: int) -> int:
        """How many pages of ``step`` bytes ``edge`` and data[start:stop] have in common from the start."""
        return int(self._common_prefix_len(edge.data, data, start, stop, step, edge.nodes))

    def fill_table(self, nodes: list[Node], table: Int32Array) -> None:
        """table[i] = the device page of nodes[i], each of which has one; counts one more use of each."""
        assert table.flags.c_contiguous, "a page table that is not contiguous"
        assert len(table) == len(nodes), "a page table with another length"
        self._fill_table(nodes, table.ctypes.data)


@cache
def native_radix() -> NativeRadix | None:
    """The library, built at first use; None: there is no compiler, or the build failed."""
    try:
        path = build_extension(_SOURCE)
        return None if path is None else NativeRadix(path)
    except (BuildError, OSError, TypeError) as error:
        _log.warning("the cache's radix tree runs in Python, which is slower: %s", error)
        return None
