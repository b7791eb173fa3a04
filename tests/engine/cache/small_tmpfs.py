"""A real, small memory file system, and another process that fills and empties it. Needs the right to mount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_tmpfs(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a tmpfs of this size; skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "forebay-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


def free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


class Filler:
    """Another process that writes into ``folder`` until the file system is full, and removes what it wrote,
    when told to.
    """

    SCRIPT = """
import os, sys
path = sys.argv[1]
for line in sys.stdin:
    if line.startswith("fill"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        chunk = 65536
        while chunk >= 1024:
            try:
                os.write(fd, b"x" * chunk)
            except OSError:
                chunk //= 2
        os.close(fd)
    elif os.path.exists(path):
        os.unlink(path)
    print("done", flush=True)
"""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT, str(folder / "somebody-elses-file")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fill(self) -> None:
        self._tell("fill")

    def empty(self) -> None:
        self._tell("empty")

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0
