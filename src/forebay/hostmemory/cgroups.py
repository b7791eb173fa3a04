"""The memory control groups of a process: limit, usage, and how much can still be allocated.

    room = limit - usage + inactive_file + active_file

``usage`` counts page cache. When an allocation would exceed the limit, the kernel first reclaims the group's page cache
from both lists, ``inactive_file`` and ``active_file``; it kills a process only when that is not enough. So all of the
page cache is room. ``MemAvailable`` of /proc/meminfo counts both lists in the same way (mm/page_alloc.c,
``si_mem_available``). Counting ``inactive_file`` alone, as kubelet does for its working set, makes a checkpoint that
was read twice look like memory in use. tmpfs and shared memory are not in these two lists (they are anonymous memory to
the kernel), so /dev/shm counts as used.

The limit of version 2 is the smaller of ``memory.max`` and ``memory.high``: above ``high`` processes are not killed but
slowed down until they are below it. A process is bound by its own group and by every group above it.

Fields: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the Linux sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

__all__ = ["Cgroup", "ReadText", "cgroup_folders", "read_cgroups"]

ReadText = Callable[[str], str]
"""Reads a small text file by its absolute path. Raises OSError."""

_UNLIMITED_V1 = 1 << 60
"""Version 1 writes "no limit" as a number just below 2**63."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One control group that has a memory limit."""

    version: int
    path: str
    limit_bytes: int
    usage_bytes: int
    reclaimable_bytes: int
    """Page cache of files: part of the usage, reclaimed by the kernel before it kills a process."""

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.usage_bytes + self.reclaimable_bytes)


def read_cgroups(read: ReadText, pid: int | None = None) -> list[Cgroup]:
    """The groups with a limit that ``pid`` (None: the reader itself) is in, its own first, then those above it."""
    found = []
    for version, folder in cgroup_folders(read, pid):
        group = _read_v2(read, folder) if version == 2 else _read_v1(read, folder)
        if group is not None:
            found.append(group)
    return found


def cgroup_folders(read: ReadText, pid: int | None = None) -> list[tuple[int, str]]:
    """(version, folder) of a process's memory group and of each one above it.

    Inside a container the path in /proc/PID/cgroup may be the host's, while /sys/fs/cgroup shows the container's part
    only. So the root of the mount is always in the list, and folders that do not exist must be skipped by the caller.
    """
    try:
        lines = read(f"/proc/{pid if pid is not None else 'self'}/cgroup").splitlines()
    except OSError:
        return []
    found: list[tuple[int, str]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            # Beside version 1 ("hybrid") version 2 is mounted one level deeper.
            for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                found += [(2, folder) for folder in _upwards(mount, path)]
        elif "memory" in controllers.split(","):
            found += [(1, folder) for folder in _upwards("/sys/fs/cgroup/memory", path)]
    return found


def _upwards(root: str, path: str) -> list[str]:
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    return ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _read_v2(read: ReadText, folder: str) -> Cgroup | None:
    try:
        limits = [_limit_v2(read, f"{folder}/{name}") for name in ("memory.max", "memory.high")]
        given = [limit for limit in limits if limit is not None]
        if not given:
            return None
        usage = int(read(f"{folder}/memory.current"))
        stat = _pairs(read(f"{folder}/memory.stat"))
    except (OSError, ValueError):
        return None
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return Cgroup(2, folder, min(given), usage, reclaimable)


def _limit_v2(read: ReadText, path: str) -> int | None:
    try:
        text = read(path).strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _read_v1(read: ReadText, folder: str) -> Cgroup | None:
    try:
        limit = int(read(f"{folder}/memory.limit_in_bytes"))
        usage = int(read(f"{folder}/memory.usage_in_bytes"))
        stat = _pairs(read(f"{folder}/memory.stat"))
    except (OSError, ValueError):
        return None
    if limit >= _UNLIMITED_V1:
        return None
    # "total_" counts the groups below as well, as the usage does.
    reclaimable = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    return Cgroup(1, folder, limit, usage, reclaimable)


def _pairs(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}
