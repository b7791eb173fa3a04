"""Does the host pool fit: three numbers read here, and a pure function that judges them.

The engine may not import forebay.machine, so this is the one module of the cache that looks at /proc and /sys.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forebay.causes import Cause
from forebay.errors import RefusedError
from forebay.kv.pool_sizes import default_host_reserve
from forebay.sizes import format_size

__all__ = ["HostLimits", "HostVerdict", "judge_host_pool", "read_host_limits", "require_host_pool"]

SHM = "/dev/shm"


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bytes; None where the machine has no such limit or it could not be read."""

    available: int | None
    """MemAvailable."""
    cgroup_room: int | None
    """The tightest limit of this process's control groups less what is used there and cannot be reclaimed."""
    shm_free: int | None
    """Free space of /dev/shm."""


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """``cause`` is None when ``asked`` bytes fit; ``largest`` is the largest size that does."""

    asked: int
    reserve: int
    largest: int
    limits: HostLimits
    cause: Cause | None

    def explain(self) -> str:
        """One line with every number."""

        def show(value: int | None) -> str:
            return "no limit" if value is None else format_size(value)

        return (
            f"host cache of {format_size(self.asked)} in total: memory available {show(self.limits.available)}, "
            f"control group room {show(self.limits.cgroup_room)}, /dev/shm free {show(self.limits.shm_free)}, "
            f"reserve {format_size(self.reserve)}; the largest that fits is {format_size(self.largest)}"
        )

    def require(self) -> None:
        """Raise RefusedError (``host_pool_too_big`` or ``shm_too_small``) if it does not fit."""
        if self.cause is None:
            return
        fix = f"ask for at most --host-cache {self.largest // 10**6}MB"
        if self.cause is Cause.SHM_TOO_SMALL:
            fix += ", or enlarge /dev/shm (docker: --shm-size)"
        raise RefusedError(self.explain(), fix=fix, code=self.cause)


def judge_host_pool(asked: int, limits: HostLimits, reserve: int) -> HostVerdict:
    """Whether ``asked`` bytes of shared memory fit, keeping ``reserve`` bytes free of what memory there is.

    The reserve is for memory, not for /dev/shm: that is only a quota.
    """
    memory = [n - reserve for n in (limits.available, limits.cgroup_room) if n is not None]
    rooms = memory + ([limits.shm_free] if limits.shm_free is not None else [])
    largest = max(0, min(rooms)) if rooms else asked
    if asked <= largest:
        return HostVerdict(asked, reserve, largest, limits, None)
    by_memory = bool(memory) and asked > min(memory)
    return HostVerdict(asked, reserve, largest, limits, Cause.HOST_POOL_TOO_BIG if by_memory else Cause.SHM_TOO_SMALL)


def require_host_pool(asked: int, reserve: int | None = None) -> HostVerdict:
    """Judge ``asked`` bytes against this machine now; for use before anything is loaded.

    Raises:
        RefusedError: it does not fit, with every number.
    """
    limits = read_host_limits()
    verdict = judge_host_pool(asked, limits, default_host_reserve(limits.available) if reserve is None else reserve)
    verdict.require()
    return verdict


def read_host_limits() -> HostLimits:
    """What this machine has now."""
    available = _meminfo_available()
    try:
        shm = os.statvfs(SHM)
        shm_free: int | None = shm.f_bavail * shm.f_frsize
    except OSError:
        shm_free = None
    return HostLimits(available, _cgroup_room(), shm_free)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_room() -> int | None:
    """The least room over this process's memory control groups and their parents (version 2, then 1)."""
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    rooms = []
    for _, controllers, group in entries:
        if controllers == "":
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / group.lstrip("/")
        while folder != base.parent:
            room = _group_room(folder, *names)
            if room is not None:
                rooms.append(room)
            folder = folder.parent
    return min(rooms) if rooms else None


def _group_room(folder: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    try:
        text = (folder / limit_name).read_text().strip()
        if text == "max" or int(text) >= 1 << 60:
            return None
        limit, usage = int(text), int((folder / usage_name).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable:
                usage -= int(value)
        return max(0, limit - usage)
    except (OSError, ValueError):
        return None
