"""Starts and servers that stand still: which stage, for how long, and who waits for whom.

Read from lines that say that something is waited for (``event_patterns/waiting.toml``), how often they repeat, and from the time
between the last progress and the last line.
"""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.evidence_base import EventMatch, EvidenceBase
from forebay.operation.doctor.fixes import fill
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Priority

__all__ = ["stall_candidates"]

_WAITS: tuple[tuple[str, Cause, str, str], ...] = (
    (
        "waits_for_port",
        Cause.PORT_IN_USE,
        "It waits for port {port}, which another process holds",
        "see who holds the port (`ss -ltnp`) and end that process, or choose another one",
    ),
    (
        "waits_for_storage",
        Cause.MOONCAKE_UNREACHABLE,
        "It waits for its storage or metadata server[ at {peer}]",
        "start that server first, and check its address and the firewall from this node: `nc -vz HOST PORT`",
    ),
    (
        "waits_for_download",
        Cause.START_STALLED,
        "It waits for a download of the checkpoint",
        "check the way to the hub (proxy, HF_ENDPOINT, token) or download first and name the folder; a lock left by an ended "
        "download is removed with `find HF_HOME -name '*.lock' -delete`",
    ),
    (
        "waits_for_ranks",
        Cause.START_STALLED,
        "It waits for other ranks to join[ ({joined} of {all} are there)]",
        "read the logs of the ranks that are missing; check that every node uses the same address and port of rank 0 "
        "(--dist-init-addr, MASTER_ADDR), that the firewall lets it through, and that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
        "name the network they share",
    ),
    (
        "waits_for_gpus",
        Cause.START_STALLED,
        "It waits for a placement on GPUs that the cluster does not have free",
        "compare `ray status` with the GPUs asked for (tensor x pipeline parallel); end the job that holds them",
    ),
    (
        "waits_for_worker",
        Cause.ENGINE_HUNG,
        "A process waits for another one that does not answer",
        "look at the process that does not answer (`py-spy dump --pid PID`) before ending it; a compilation or a long prefill "
        "looks the same for some minutes",
    ),
)
_LEAST_S = 60.0


def stall_candidates(base: EvidenceBase) -> list[Candidate]:
    """A log that ends in waiting: the last wait that no progress followed."""
    found = [
        (match, row)
        for row in _WAITS
        for match in base.events.get(row[0], [])[-1:]
        if not _went_on(base, match.index) and _long(base, row[0], match)
    ]
    if not found:
        return []
    match, (event, cause, meaning, fix) = max(found, key=lambda item: item[0].index)
    return [_candidate(base, match, event, cause, meaning, fix)]


def _went_on(base: EvidenceBase, index: int) -> bool:
    entry = base.transcript.entries[index]
    if base.transcript.sources[entry.source].served > entry.served:
        return True
    return any(at > index and base.transcript.entries[at].source == entry.source for at, _ in base.transcript.advances)


def _long(base: EvidenceBase, event: str, match: EventMatch) -> bool:
    """It was said more than once, or says itself how long it took, or the log goes on for a while after it."""
    if len(base.events[event]) > 2 or (match.number("seconds") or 0) >= 2 * _LEAST_S:
        return True
    first = base.events[event][0].line.time_s
    last = base.transcript.entries[-1].line.time_s
    return first is not None and last is not None and last - first >= _LEAST_S


def _candidate(base: EvidenceBase, match: EventMatch, event: str, cause: Cause, meaning: str, fix: str) -> Candidate:
    times = [other.line.time_s for other in base.events[event] if other.line.time_s is not None]
    spent = times[-1] - times[0] if len(times) > 1 else match.number("seconds") or 0.0
    duration = f" for at least {spent:.0f} s" if spent >= 1 else ""
    repeats = len(base.events[event])
    often = f", said {repeats} times" if repeats > 2 else ""
    rank = f" Rank {match.line.rank} says so." if match.line.rank is not None else ""
    return Candidate(
        cause,
        Priority.SECONDARY,
        (0.0,),
        f"{fill(meaning, match)}{duration}{often}, and nothing else moves.{rank}",
        fix,
        (base.transcript.evidence(base.events[event][0].index), base.transcript.evidence(match.index)),
        index=match.index,
        confidence=Confidence.LIKELY,
    )
