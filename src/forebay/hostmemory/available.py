"""What a new process can allocate on a machine: MemAvailable, or less where a control group allows less."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forebay.hostmemory.cgroups import Cgroup, ReadText, read_cgroups

__all__ = ["AvailableMemory", "read_available_memory", "read_meminfo"]


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """``cgroup`` is the control group that leaves the least room; None where no group has a limit."""

    mem_available_bytes: int
    cgroup: Cgroup | None

    @property
    def available_bytes(self) -> int:
        if self.cgroup is None:
            return self.mem_available_bytes
        return min(self.mem_available_bytes, self.cgroup.available_bytes)


def read_available_memory(read: ReadText | None = None) -> AvailableMemory:
    """Read it now, for the reading process.

    Args:
        read: reads a file of the machine in question; None: of this machine.

    Raises:
        OSError: there is no /proc/meminfo.
    """
    read = read or _read_local
    info = read_meminfo(read)
    tightest = min(read_cgroups(read), key=lambda group: group.available_bytes, default=None)
    return AvailableMemory(info.get("MemAvailable", info.get("MemFree", 0)), tightest)


def read_meminfo(read: ReadText) -> dict[str, int]:
    """/proc/meminfo in bytes, by the kernel's names. Raises OSError."""
    return {name: int(value) * 1024 for name, value in re.findall(r"(?m)^(\w+):\s+(\d+)", read("/proc/meminfo"))}


def _read_local(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
