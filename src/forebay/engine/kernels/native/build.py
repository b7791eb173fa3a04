"""Builds the native kernel library, once, at first use.

The library contains every variant that the compiler knows (AMX, AVX512-BF16, AVX2, generic) and selects one at run
time, so one file works on any machine of its architecture. It lies in ``cache_dir()/native`` under a name that hashes
the sources, the compiler and the flags: a changed source gives a new file, and an old one is never loaded by mistake.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from forebay.compiler.cpp import BuildError, build_key, built_once, find_compiler, run_compiler

__all__ = ["BuildError", "build_extension", "build_library", "find_compiler"]

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent
_FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-fno-math-errno",
    "-Wno-psabi",
    # Sums must not depend on which of several inlined copies the compiler chose to fuse.
    "-ffp-contract=off",
]
_SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
_VARIANTS = {
    "amx": "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16 -mprefer-vector-width=512",
    "avx512_bf16": "-march=x86-64-v4 -mavx512bf16 -mprefer-vector-width=512",
    "avx2": "-march=x86-64-v3",
    "generic": "",
}


@dataclass(frozen=True, slots=True)
class _Unit:
    """One object file: its source and its own flags."""

    name: str
    source: str
    flags: tuple[str, ...]


def build_library(
    progress: Callable[[str], None] | None = None, *, sanitize: bool = False, only: Collection[str] = tuple(_VARIANTS)
) -> Path | None:
    """The library's file, building it when it is not there yet.

    Two processes that start together build it once: the second waits for the first's lock.

    Args:
        progress: called with a line for a person at each step of a build.
        sanitize: a build with the address and undefined-behaviour sanitizers, for tests.
        only: leave out other variants (tests); the generic one is always there.

    Returns:
        The file, or None when there is no compiler.

    Raises:
        BuildError: the compiler failed.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    units = _units(compiler, only)
    flags = [*_FLAGS, *(_SANITIZE if sanitize else [])]
    sources = sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")])
    key = build_key(compiler, repr((platform.machine(), units, flags)), sources)
    return built_once(f"libforebay-{key}.so", lambda t: _build(compiler, units, flags, t, progress or _log.info))


def build_extension(source: Path) -> Path | None:
    """A shared library from one file that uses Python's C interface, for this interpreter; built once.

    Returns:
        The file, or None when there is no compiler or Python's headers are not installed.

    Raises:
        BuildError: the compiler failed.
    """
    compiler, include = find_compiler(), sysconfig.get_path("include")
    if compiler is None or not (Path(include) / "Python.h").exists():
        return None
    flags = [*_FLAGS, f"-I{include}"]
    key = build_key(compiler, repr((platform.machine(), sys.implementation.cache_tag, flags)), [source])

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            linked = Path(folder) / target.name
            run_compiler([compiler, *flags, "-shared", str(source), "-o", str(linked)])
            linked.replace(target)

    return built_once(f"{source.stem}-{key}.so", build)


def _units(compiler: str, only: Collection[str]) -> list[_Unit]:
    """The object files this compiler can make: variants whose flags it does not know are left out."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    units = []
    for name, text in _VARIANTS.items():
        flags = tuple(text.split())
        if name == "generic" or (x86 and name in only and _accepts(compiler, flags)):
            units.append(_Unit(name, "variant.cpp", (*flags, f"-DFOREBAY_VARIANT={name}")))
    have = tuple(f"-DFB_HAVE_{unit.name.upper()}" for unit in units)
    return [*units, _Unit("library", "library.cpp", have), _Unit("pool", "pool.cpp", ())]


def _accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    command = [compiler, *flags, "-x", "c++", "-E", "-o", os.devnull, os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _build(compiler: str, units: list[_Unit], flags: list[str], target: Path, progress: Callable[[str], None]) -> None:
    progress(f"building the kernel library with {compiler} (once; about half a minute)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        objects = [Path(folder) / f"{unit.name}.o" for unit in units]

        def compile_unit(unit: _Unit, out: Path) -> None:
            source = str(_SOURCES / unit.source)
            run_compiler([compiler, *flags, *unit.flags, "-c", source, "-o", str(out)])
            progress(f"kernel library: compiled {unit.name}")

        with ThreadPoolExecutor(max_workers=min(len(units), os.cpu_count() or 1)) as pool:
            list(pool.map(compile_unit, units, objects))
        linked = Path(folder) / target.name
        run_compiler([compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)])
        linked.replace(target)
    progress(f"kernel library ready: {target}")
