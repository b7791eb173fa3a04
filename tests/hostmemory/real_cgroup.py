"""A real memory control group below this process's own, with processes in it. Needs root; skipped elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.hostmemory.cgroups import cgroup_folders


class RealCgroup:
    """One group, made with a limit."""

    def __init__(self, version: int, folder: Path, limit_bytes: int) -> None:
        self.version = version
        self.folder = folder
        folder.mkdir()
        (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        swap = folder / ("memory.swap.max" if version == 2 else "memory.swappiness")
        if swap.exists():
            swap.write_text("0")

    def run(self, script: str, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a Python script in the group, to its end (also when the kernel kills it)."""
        join = f"import os\nopen({str(self.folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        command = [sys.executable, "-c", join + textwrap.dedent(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

    def remove(self) -> None:
        """Give back what is charged to the group, and the group. Its processes have ended."""
        force = self.folder / "memory.force_empty"
        deadline = time.monotonic() + 20
        while True:
            try:
                if force.exists():
                    force.write_text("0")
                self.folder.rmdir()
                return
            except OSError:  # an ended process has not left it yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@contextmanager
def real_cgroup(limit_bytes: int) -> Iterator[RealCgroup]:
    """A new group with this limit, removed afterwards. Skips the test where none can be made."""
    reasons = []
    for version, name in cgroup_folders(lambda path: Path(path).read_text()):
        folder = Path(name) / f"forebay-test-{os.getpid()}"
        try:
            group = RealCgroup(version, folder, limit_bytes)
        except OSError as error:
            reasons.append(f"{name}: {error.strerror}")
            if folder.is_dir():
                folder.rmdir()
            continue
        try:
            yield group
        finally:
            group.remove()
        return
    pytest.skip(f"no memory control group can be made here ({'; '.join(reasons) or 'none is mounted'})")


READ_AGAIN_AND_AGAIN = """
    import sys
    for _ in range(4):  # the second reading makes the pages active
        with open(sys.argv[1], "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
"""


def fill_with_page_cache(group: RealCgroup, path: Path, nbytes: int) -> None:
    """Have a process of the group read a file until all of it is active page cache charged to the group."""
    path.write_bytes(b"x" * nbytes)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the group is charged, not the writer
    done = group.run(READ_AGAIN_AND_AGAIN, str(path))
    assert done.returncode == 0, done.stderr


def on_a_disk(tmp_path: Path) -> Path:
    """A folder whose files have page cache: not on a memory file system."""
    for folder in (tmp_path, Path("/var/tmp")):
        kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
        if kind.stdout.strip() not in ("tmpfs", "ramfs", ""):
            return folder
    pytest.skip("no folder on a disk")
