"""Processes that ended without a word: what they were doing when the log stops, and whether the machine can hold what they asked for."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.causes import Cause
from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.evidence_base import EventMatch, EvidenceBase
from forebay.operation.doctor.lifecycle import StartOutcome
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Priority
from forebay.servers.log_patterns import Stage
from forebay.sizes import GB, GIB, format_size

__all__ = ["HostDemand", "host_demand", "silent_candidates"]

_UNITS = {"GB": GB, "GiB": GIB, "MB": 10**6, "MiB": 2**20, "B": 1, "bytes": 1, "": GB}
_LAST_LINES = 12
_RESERVE = 10 * GIB
_BIG = 128 * GB


@dataclass(frozen=True, slots=True)
class HostDemand:
    """Host memory that the log says was asked for.

    Attributes:
        per_rank_bytes: of one rank: its pools added up; where ranks differ, of the largest.
        ranks: ranks that share the host; None where the log does not say.
        ranks_seen: ranks that wrote such a line.
        indices: the lines.
        setting: the flag or setting that sizes it.
    """

    per_rank_bytes: float
    ranks: int | None
    ranks_seen: int
    indices: tuple[int, ...]
    setting: str

    @property
    def total_bytes(self) -> float:
        """On one host; of the ranks that wrote a line where their number is not stated."""
        return self.per_rank_bytes * (self.ranks or self.ranks_seen)


def host_demand(base: EvidenceBase) -> HostDemand | None:
    """What the log asks of host memory, or None where it asks for nothing."""
    for event, setting in (("host_pool_allocating", "--hicache-size"), ("lmcache_pool_size", "max_local_cpu_size")):
        found = base.events.get(event, [])
        by_rank: dict[int | None, dict[str, float]] = {}
        for match in found:
            pools = by_rank.setdefault(match.line.rank if match.line.rank is not None else _process(match), {})
            pools[match.text("pool")] = max(pools.get(match.text("pool"), 0.0), _bytes(match))
        if by_rank:
            per_rank = max(sum(pools.values()) for pools in by_rank.values())
            indices = tuple(match.index for match in found[:8])
            return HostDemand(per_rank, base.launch.ranks_per_host, len(by_rank), indices, setting)
    return None


def _process(match: EventMatch) -> int | None:
    return hash(match.line.name) if match.line.name else None


def _bytes(match: EventMatch) -> float:
    return (match.number("size") or 0.0) * _UNITS.get(match.text("unit"), GB)


def silent_candidates(base: EvidenceBase) -> list[Candidate]:
    """A start whose log stops while host memory is allocated, with no error: the machine did not hold what was asked for."""
    demand = host_demand(base)
    if demand is None or base.life.came_up or base.life.outcome is StartOutcome.STOPPED:
        return []
    last = max(demand.indices)
    entries = base.transcript.entries
    own = [index for index in range(last + 1, len(entries)) if entries[index].source == entries[last].source]
    went_on = any(at > last and entries[at].stage is not Stage.HOST_POOL for at, _ in base.transcript.advances)
    hosted = any("hicache_attached=True" in entries[index].line.text for index in own)
    if len(own) > _LAST_LINES or went_on or hosted or any(entries[index].served for index in own):
        return []
    room = base.machine.host_available_bytes or base.machine.host_memory_bytes
    if room is not None and demand.total_bytes <= room - _RESERVE / 2:
        return []
    if room is None and not _ended(base) and (demand.ranks_seen < 2 or demand.total_bytes < _BIG):
        return []  # nothing says that the process ended, and what is asked for is no surprise: it may still be at it
    return [_too_big(base, demand, room)]


def _ended(base: EvidenceBase) -> bool:
    """Something besides the silence says that a process ended."""
    return base.observed.exit_code not in (None, 0) or "process_vanished" in base.events


def _too_big(base: EvidenceBase, demand: HostDemand, room: int | None) -> Candidate:
    ranks = demand.ranks or demand.ranks_seen
    each = (
        f"{format_size(demand.per_rank_bytes)} in each of {ranks} ranks"
        if ranks > 1
        else f"{format_size(demand.per_rank_bytes)}"
    )
    total = f", {format_size(demand.total_bytes)} together" if ranks > 1 else ""
    least = demand.total_bytes + _RESERVE
    if room is None:
        has = f"what the machine has is not in the log; at least {format_size(least)} of free host memory would hold it (give --host-memory)"
    else:
        has = f"the machine has {format_size(room)}"
    return Candidate(
        Cause.HOST_POOL_TOO_BIG,
        Priority.SECONDARY,
        (0.0,),
        f"The log ends while host memory is allocated: {each}{total}; {has}.",
        _smaller(demand, room, ranks),
        tuple(base.transcript.evidence(index) for index in demand.indices[:4]),
        index=demand.indices[0],
        confidence=Confidence.LIKELY,
    )


def _smaller(demand: HostDemand, room: int | None, ranks: int) -> str:
    unit = "decimal GB per rank" if demand.setting == "--hicache-size" else "GB per rank"
    if room is None:
        return (
            f"lower {demand.setting} ({unit}) so that its sum over the ranks of a host stays 10 GiB below the free host memory, "
            "or use a larger machine; the kernel log shows a kill: `dmesg -T | grep -i oom`"
        )
    fits = int(max(room - _RESERVE, 0) * 0.95 / ranks / GB)
    if fits < 1:
        return f"the machine holds no such pool: leave the host tier off, or give the machine at least {format_size(demand.total_bytes + _RESERVE)}"
    return (
        f"set {demand.setting} {fits} or less ({unit}; {ranks} x {fits} GB leaves 10 GiB of {format_size(room)} free)"
    )
