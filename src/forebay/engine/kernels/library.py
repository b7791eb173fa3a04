"""Loads the native library: declares its functions, checks its version, lists its instruction sets."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forebay.engine.kernels.native.build import BuildError, build_library

__all__ = ["best_copy", "load_library", "variants", "variants_of"]

_ABI_VERSION = 5


def load_library(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.fb_abi_version.restype = ctypes.c_int64
    if lib.fb_abi_version() != _ABI_VERSION:
        raise BuildError(f"{path} has version {lib.fb_abi_version()} of the interface, needed is {_ABI_VERSION}")
    lib.fb_variant.argtypes, lib.fb_variant.restype = [ctypes.c_int64], ctypes.c_char_p
    lib.fb_create.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
    lib.fb_create.restype = ctypes.c_void_p
    lib.fb_destroy.argtypes, lib.fb_destroy.restype = [ctypes.c_void_p], None
    lib.fb_call.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p]
    lib.fb_call.restype = None
    lib.fb_program.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64]
    lib.fb_program.restype = None
    lib.fb_copy_way.restype = ctypes.c_int64
    lib.fb_copy_runs.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    lib.fb_copy_runs.restype = None
    return lib


def best_copy(lib: ctypes.CDLL) -> Callable[[int, int, int, int], object]:
    """``fb_copy_runs`` (addresses of targets, of sources, their number, bytes each) with this machine's best copy."""
    return partial(lib.fb_copy_runs, lib.fb_copy_way())


def variants_of(lib: ctypes.CDLL) -> list[str]:
    names: list[str] = []
    while (name := lib.fb_variant(len(names))) is not None:
        names.append(name.decode())
    return names


def variants() -> list[str]:
    """Instruction sets of the library that this machine supports, best first; empty without a compiler."""
    path = build_library()
    return [] if path is None else variants_of(load_library(path))
