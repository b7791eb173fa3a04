"""The native passes over a prefix's pages (native/native_radix.cpp), where there is a compiler and Python's headers.

Without them ``native_radix`` is None and everybody does the same in Python: same results, a few times the time.
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
"""For so few pages a call is not worth its own cost."""


class NativeRadix:
    """Calls of the library at ``path``. One layer group, lists of its nodes from the root down; lru queues."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.PyDLL(str(path))  # keeps the interpreter's lock: it works on objects

        def function(name: str, *arguments: object) -> ctypes._FuncPointer:
            pointer = getattr(lib, name)
            pointer.argtypes, pointer.restype = list(arguments), ctypes.py_object
            return pointer  # type: ignore[no-any-return]

        py, size = ctypes.py_object, ctypes.c_ssize_t
        function("fb_pages_init", py, py)(Node, CachedPage)
        self._alike = function("fb_pages_alike", py, py, size, size, size, py)
        self.on_device = function("fb_pages_on_device", py)
        """(nodes) -> bool: every one has a device copy."""
        self.hold = function("fb_pages_hold", py, ctypes.c_int)
        """(nodes, has_host) -> how many copies left the device's and the host's queue."""
        self.release = function("fb_pages_release", py, py, py, py)
        """(nodes, now, the device queue's sentinel, the host queue's or None) -> how many copies joined each, and
        whether some node is left with neither."""
        self._use = function("fb_pages_use", py, ctypes.c_void_p)

    def alike(self, run: Edge, data: bytes, start: int, stop: int, step: int) -> int:
        """How many pages of ``step`` bytes ``run`` and data[start:stop] begin with alike."""
        return int(self._alike(run.data, data, start, stop, step, run.nodes))

    def use(self, nodes: list[Node], table: Int32Array) -> None:
        """table[i] = nodes[i]'s device page, which there is; each was used once more."""
        assert table.flags.c_contiguous, "a page table in pieces"
        assert len(table) == len(nodes), "a page table of another length"
        self._use(nodes, table.ctypes.data)


@cache
def native_radix() -> NativeRadix | None:
    """The library, built at first use; None: there is no compiler, or it failed."""
    try:
        path = build_extension(_SOURCE)
        return None if path is None else NativeRadix(path)
    except (BuildError, OSError, TypeError) as error:
        _log.warning("the cache's tree does without its native passes: %s", error)
        return None
