"""Native libraries: built once at first use, under a name that hashes the sources, the compiler and the flags.

The files are in ``cache_dir()/native``. A changed source is a new file, so an old one is never loaded by mistake.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forebay.paths import cache_dir

__all__ = ["BuildError", "build_key", "build_source", "built_once", "find_compiler", "run_compiler"]

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-fno-math-errno")


class BuildError(Exception):
    """The compiler failed; the message ends with its output."""


def find_compiler() -> str | None:
    """Path of a C++ compiler: ``$CXX``, else the first of g++, c++, clang++ on PATH; None when there is none."""
    named = os.environ.get("CXX")
    candidates = (named, *_COMPILERS) if named else _COMPILERS
    return next((found for name in candidates if (found := shutil.which(name))), None)


def build_source(source: Path, flags: Sequence[str] = _FLAGS) -> Path | None:
    """The shared library of one C++ file and the headers beside it, built when it is not there yet.

    Returns:
        The file, or None when there is no compiler.

    Raises:
        BuildError: the compiler failed.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    sources = [source, *sorted(source.parent.glob("*.h"))]
    key = build_key(compiler, repr((platform.machine(), flags)), sources)

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            linked = Path(folder) / target.name
            run_compiler([compiler, *flags, "-shared", str(source), "-o", str(linked)])
            linked.replace(target)

    return built_once(f"{source.stem}-{key}.so", build)


def built_once(name: str, build: Callable[[Path], None]) -> Path:
    """The file ``name`` of the cache folder, made by ``build`` when it is not there; a second process waits for it."""
    target = cache_dir() / "native" / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / ".lock"):
        if not target.exists():
            build(target)
    return target


def build_key(compiler: str, settings: str, sources: Sequence[Path]) -> str:
    """A hash of the compiler's version, the settings and the sources."""
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    for part in (version, settings.encode()):
        digest.update(part)
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def run_compiler(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        BuildError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise BuildError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{output}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
