"""Does the host pool fit this machine: the limits, read once, and a pure function that judges a size against them."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.causes import Cause
from forebay.errors import RefusedError
from forebay.hostmemory.available import read_available_memory
from forebay.hostmemory.shm import free_shm_bytes
from forebay.kv.pool_sizes import default_host_reserve
from forebay.sizes import format_size

__all__ = ["HostLimits", "HostVerdict", "judge_host_pool", "read_host_limits", "require_host_pool"]


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bytes; None where the machine has no such limit or it could not be read."""

    mem_available: int | None
    """MemAvailable of /proc/meminfo."""
    cgroup_available: int | None
    """What the tightest control group of this process still allows."""
    shm_free: int | None
    """Free space of /dev/shm."""

    @property
    def available(self) -> int | None:
        """What this process can still allocate."""
        return min((n for n in (self.mem_available, self.cgroup_available) if n is not None), default=None)


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
            f"host cache of {format_size(self.asked)} in total: memory available {show(self.limits.mem_available)}, "
            f"allowed by the control group {show(self.limits.cgroup_available)}, "
            f"/dev/shm free {show(self.limits.shm_free)}, "
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
    """Whether ``asked`` bytes of shared memory fit, leaving ``reserve`` bytes of the available memory.

    The reserve applies to memory and not to /dev/shm, whose size is only a quota.
    """
    memory = None if limits.available is None else limits.available - reserve
    rooms = [room for room in (memory, limits.shm_free) if room is not None]
    largest = max(0, min(rooms)) if rooms else asked
    if asked <= largest:
        return HostVerdict(asked, reserve, largest, limits, None)
    by_memory = memory is not None and asked > memory
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
    """What this process can have on this machine now."""
    try:
        memory = read_available_memory()
    except OSError:
        return HostLimits(None, None, free_shm_bytes())
    cgroup = None if memory.cgroup is None else memory.cgroup.available_bytes
    return HostLimits(memory.mem_available_bytes, cgroup, free_shm_bytes())
