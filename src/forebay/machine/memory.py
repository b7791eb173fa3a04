"""Host memory: what the kernel has, what this process's control group allows, and the limits that bite before either.

The number to plan with is ``HostMemory.available_bytes``: the smaller of MemAvailable and, for each control group from ours up
to the root, its limit - its usage + the page cache in it (which the kernel drops when the group needs room).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from forebay.machine.interface import Machine

__all__ = ["Cgroup", "HostMemory", "MemoryEvents", "NumaNode", "ShmSpace", "limits", "memory_events", "read_memory"]

_UNLIMITED_V1 = 1 << 60  # cgroup v1 writes "no limit" as a number just below 2**63


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control group that leaves the least room."""

    version: int
    path: str
    limit_bytes: int
    usage_bytes: int
    reclaimable_bytes: int
    """File-backed page cache in the group: counted as used, dropped under pressure."""

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.usage_bytes + self.reclaimable_bytes)


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """/dev/shm: a memory file system with a size of its own (64 MB by default in containers)."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node's memory."""

    index: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A machine's memory now. ``memlock_bytes`` None: no limit on locked (pinned) memory."""

    total_bytes: int
    mem_available_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int
    cgroup: Cgroup | None
    shm: ShmSpace | None
    memlock_bytes: int | None
    numa_nodes: tuple[NumaNode, ...]

    @property
    def available_bytes(self) -> int:
        """What a new process can have: MemAvailable, or less where the control group allows less."""
        return min(self.mem_available_bytes, self.cgroup.available_bytes) if self.cgroup else self.mem_available_bytes


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """A control group's own record of trouble (cgroup v2 ``memory.events``, v1 ``memory.oom_control``)."""

    path: str
    oom: int
    oom_kill: int
    high: int
    max: int


def read_memory(machine: Machine) -> HostMemory:
    """Read the machine's memory. Raises OSError where there is no /proc/meminfo."""
    info = {
        name: int(value) * 1024 for name, value in re.findall(r"(?m)^(\w+):\s+(\d+)", machine.read("/proc/meminfo"))
    }
    groups = _cgroups(machine)
    return HostMemory(
        total_bytes=info["MemTotal"],
        mem_available_bytes=info.get("MemAvailable", info.get("MemFree", 0)),
        swap_total_bytes=info.get("SwapTotal", 0),
        swap_free_bytes=info.get("SwapFree", 0),
        cgroup=min(groups, key=lambda group: group.available_bytes, default=None),
        shm=_shm(machine),
        memlock_bytes=limits(machine).get("Max locked memory"),
        numa_nodes=_numa(machine),
    )


def limits(machine: Machine, pid: int | None = None) -> dict[str, int | None]:
    """Soft limits of a process (/proc/PID/limits) by the kernel's names; None: unlimited. Empty where not readable."""
    try:
        text = machine.read(f"/proc/{pid if pid is not None else 'self'}/limits")
    except OSError:
        return {}
    found: dict[str, int | None] = {}
    for line in text.splitlines()[1:]:
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\S+)", line)
        if match:
            found[match[1]] = None if match[2] == "unlimited" else int(match[2])
    return found


def memory_events(machine: Machine, pid: int | None = None) -> list[MemoryEvents]:
    """The counters of a process's control group and of each one above it, innermost first."""
    found = []
    for version, folder in _group_folders(machine, pid):
        name = "memory.events" if version == 2 else "memory.oom_control"
        try:
            pairs = dict(line.split() for line in machine.read(f"{folder}/{name}").splitlines())
        except (OSError, ValueError):
            continue
        counts = {key: int(value) for key, value in pairs.items()}
        found.append(
            MemoryEvents(
                folder, counts.get("oom", 0), counts.get("oom_kill", 0), counts.get("high", 0), counts.get("max", 0)
            )
        )
    return found


def _cgroups(machine: Machine) -> list[Cgroup]:
    found = []
    for version, folder in _group_folders(machine, None):
        group = _read_v2(machine, folder) if version == 2 else _read_v1(machine, folder)
        if group is not None:
            found.append(group)
    return found


def _group_folders(machine: Machine, pid: int | None) -> list[tuple[int, str]]:
    """(version, folder) of a process's memory group and those above it.

    Inside a container the path in /proc/PID/cgroup may be the host's while /sys/fs/cgroup shows only our part: folders
    that are not there are skipped by the readers, and the root of the mount is always tried.
    """
    try:
        lines = machine.read(f"/proc/{pid if pid is not None else 'self'}/cgroup").splitlines()
    except OSError:
        return []
    found: list[tuple[int, str]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += [(2, folder) for folder in _upwards("/sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            found += [(1, folder) for folder in _upwards("/sys/fs/cgroup/memory", path)]
    return found


def _upwards(root: str, path: str) -> list[str]:
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    return ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _read_v2(machine: Machine, folder: str) -> Cgroup | None:
    try:
        limit = machine.read(f"{folder}/memory.max").strip()
        if limit == "max":
            return None
        usage = int(machine.read(f"{folder}/memory.current"))
        stat = _pairs(machine, f"{folder}/memory.stat")
    except (OSError, ValueError):
        return None
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return Cgroup(2, folder, int(limit), usage, reclaimable)


def _read_v1(machine: Machine, folder: str) -> Cgroup | None:
    try:
        limit = int(machine.read(f"{folder}/memory.limit_in_bytes"))
        usage = int(machine.read(f"{folder}/memory.usage_in_bytes"))
        stat = _pairs(machine, f"{folder}/memory.stat")
    except (OSError, ValueError):
        return None
    if limit >= _UNLIMITED_V1:
        return None
    reclaimable = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    return Cgroup(1, folder, limit, usage, reclaimable)


def _pairs(machine: Machine, path: str) -> dict[str, int]:
    rows = (line.split() for line in machine.read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}


def _shm(machine: Machine) -> ShmSpace | None:
    try:
        space = machine.space("/dev/shm")
    except OSError:
        return None
    return ShmSpace(space.total_bytes, space.free_bytes)


def _numa(machine: Machine) -> tuple[NumaNode, ...]:
    base = "/sys/devices/system/node"
    try:
        names = [name for name in machine.listdir(base) if re.fullmatch(r"node\d+", name)]
    except OSError:
        return ()
    nodes = []
    for name in sorted(names, key=lambda text: int(text[4:])):
        try:
            text = machine.read(f"{base}/{name}/meminfo")
        except OSError:
            continue
        info = {key: int(value) * 1024 for key, value in re.findall(r"(MemTotal|MemFree):\s+(\d+)", text)}
        nodes.append(NumaNode(int(name[4:]), info.get("MemTotal", 0), info.get("MemFree", 0)))
    return tuple(nodes)
