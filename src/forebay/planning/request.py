"""What is to be planned: the model, the machine's room, the server and its settings, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.machine.interface import GpuReading
from forebay.model.source import ModelSource
from forebay.planning.plan import Provenance

__all__ = ["HostMemoryBudget", "PlanRequest"]


@dataclass(frozen=True, slots=True)
class HostMemoryBudget:
    """Host memory a start can use.

    Args:
        available_bytes: the smaller of MemAvailable and the control group's room, or what the user gave.
        mem_available_bytes, cgroup_available_bytes: the two, where they were read.
        shm_free_bytes: free space of /dev/shm; None: not known.
        memlock_bytes: the locked-memory limit; None: none, or not known.
    """

    available_bytes: int
    how: Provenance
    note: str
    mem_available_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: int | None = None

    @property
    def limited_by_cgroup(self) -> bool:
        """The control group allows less than the host has."""
        return (
            self.cgroup_available_bytes is not None
            and self.mem_available_bytes is not None
            and self.cgroup_available_bytes < self.mem_available_bytes
        )


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The question. Sizes are bytes; None: not said, the server's or planner's default applies.

    Args:
        flags: the server's own flags by destination (``hicache_size``: 300), in the server's units.
        passthrough: flags the planner does not read; they go into the command unchanged.
        host_cache_bytes: the host tier in total over the ranks.
        reserve_bytes: what loading and the rest of the system keep of the host.
        gpus: of one machine; None: not known, the device side stays unknown.
    """

    model: ModelSource
    server: str
    version: str
    host: HostMemoryBudget
    gpus: tuple[GpuReading, ...] | None = None
    tp: int = 1
    dp: int = 1
    pp: int = 1
    dtype: str | None = None
    kv_dtype: str | None = None
    context: int | None = None
    concurrency: int | None = None
    host_cache_bytes: int | None = None
    device_cache_bytes: int | None = None
    weights_bytes: int | None = None
    reserve_bytes: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    passthrough: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
