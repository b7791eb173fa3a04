"""Start a module of ``benchmarks`` as a process of its own, from any folder and with any interpreter."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["module_command", "module_env", "null_server"]

_ROOT = Path(__file__).resolve().parents[2]


def module_command(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """``python -m benchmarks.NAME``; it needs ``module_env``.

    A module is never started by its path: Python would then put its folder first in ``sys.path``, where a file named
    like an installed package hides that package.
    """
    return [python, "-m", f"benchmarks.{name}", *arguments]


def module_env() -> dict[str, str]:
    """The environment with the repository's folder on ``PYTHONPATH``."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@contextlib.contextmanager
def null_server(*flags: str) -> Iterator[str]:
    """``benchmarks.null_server`` on a free port; yields its URL and ends it."""
    command = module_command("null_server", *flags)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=module_env())
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().rsplit(' ', 1)[1].strip()}"
    finally:
        server.terminate()
        server.wait()
