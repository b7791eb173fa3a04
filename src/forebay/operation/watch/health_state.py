"""What a server is doing, judged from observations alone (DESIGN.md, "evidence, not faith").

    dead      at once: an essential process is gone, an error line says so, another process took its port
    hung      at once in process state T; else our token is outstanding and for 5 s no token counter moves and no engine
              process uses CPU; or tokens stand still for --hang-seconds while CPU moves
    busy      our token is outstanding, something moves
    stalled   starting, and for --stall-seconds no percentage, log, bytes read, memory growth or CPU time
    ready     its processes are alive, they own the socket, health is 2xx and one real token came
    unknown   nothing listens and no pid is known

The judge keeps what it needs to know of the past (when something last moved); time comes with each observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay.operation.watch.observation import Activity, Observation, OwnerKind, Watched
from forebay.servers.base import Condition, Role

__all__ = ["HealthState", "HealthStateMachine", "Limits", "Verdict"]


class HealthState(StrEnum):
    """A server's state in one word."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    BUSY = "busy"
    PAUSED = "paused"
    HUNG = "hung"
    STALLED = "stalled"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long is long. All in seconds."""

    quiet_s: float = 5.0
    hang_s: float = 120.0
    stall_s: float = 300.0
    foreign_port_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A state, since when (monotonic seconds), and why."""

    state: HealthState
    since: float
    evidence: tuple[str, ...]
    note: str = ""  # activity worth showing beside the state


# What counts as having moved: less is noise of timers and garbage collection.
_CPU_SHARE = 0.02
_GROWN_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class HealthStateMachine:
    """Turns a run of observations into verdicts. ``own``: the server was started by us, so its port must be its own."""

    def __init__(self, port: int, *, own: bool, limits: Limits | None = None) -> None:
        self._port = port
        self._own = own
        self._limits = limits or Limits()
        self._verdict: Verdict | None = None
        self._was_ready = False
        self._progress = _Since()
        self._cpu = _Rate()
        self._engine_cpu = _Rate()
        self._tokens = _Since()
        self._foreign_since: float | None = None

    def look(self, seen: Observation) -> Verdict:
        """The verdict after ``seen``; ``since`` is kept while the state stays the same."""
        self._note_movement(seen)
        state, evidence, note = self._decide(seen)
        before = self._verdict
        since = before.since if before is not None and before.state is state else seen.at
        if state is HealthState.READY:
            self._was_ready = True
        self._verdict = Verdict(state, since, tuple(evidence), note)
        return self._verdict

    def _note_movement(self, seen: Observation) -> None:
        moving = seen.activity
        self._progress.note(
            seen.at,
            (
                seen.stage,
                seen.percent,
                moving.log_bytes,
                moving.rss_bytes // _GROWN_BYTES,
                moving.read_bytes // _READ_BYTES,
            ),
        )
        self._tokens.note(seen.at, moving.tokens)
        self._cpu.note(seen.at, moving.cpu_s)
        self._engine_cpu.note(seen.at, moving.engine_cpu_s)

    def _decide(self, seen: Observation) -> tuple[HealthState, list[str], str]:
        dead = self._dead(seen)
        if dead:
            return HealthState.DEAD, dead, ""
        stopped = [process for process in seen.processes if process.stopped and process.role is not Role.HELPER]
        if stopped:
            return HealthState.HUNG, [_stopped(process) for process in stopped], ""
        if not seen.pid_known and _nobody(seen):
            return HealthState.UNKNOWN, [f"nothing listens on port {self._port}, and no pid is known"], ""
        if seen.paused is not None:
            return HealthState.PAUSED, [seen.paused], ""
        if seen.token.outstanding_since is not None:
            waiting = self._waiting_for_token(seen, seen.token.outstanding_since)
            if waiting is not None:
                return waiting
        if self._serves(seen):
            return HealthState.READY, self._ready_evidence(seen), ""
        if seen.error_line is not None and not self._was_ready:
            return HealthState.DEAD, [f"log: {seen.error_line}"], ""
        return self._starting(seen)

    def _dead(self, seen: Observation) -> list[str]:
        evidence = [lost.describe() for lost in seen.lost]
        if self._own and seen.owner.kind is OwnerKind.OTHER:
            self._foreign_since = seen.at if self._foreign_since is None else self._foreign_since
            if seen.at - self._foreign_since >= self._limits.foreign_port_s:
                evidence.append(
                    f"{seen.owner.describe(self._port)}, which is not this server: it can never serve there"
                )
        else:
            self._foreign_since = None
        if (
            seen.health is not None
            and seen.health.condition is Condition.UNHEALTHY
            and not seen.processes
            and self._was_ready
        ):
            evidence.append(seen.health.evidence)
        return evidence

    def _waiting_for_token(self, seen: Observation, since: float) -> tuple[HealthState, list[str], str] | None:
        waited = seen.at - since
        if waited < self._limits.quiet_s:
            return None
        limits = self._limits
        token_quiet = min(waited, self._tokens.quiet(seen.at))
        cpu = self._engine_cpu.share(seen.at, limits.quiet_s)
        asked = f"our one-token request has been outstanding for {waited:.0f} s"
        counter = "no token counter is known" if seen.activity.tokens is None else (
            f"the token counter stands at {seen.activity.tokens:.0f} for {token_quiet:.0f} s")  # fmt: skip
        if cpu is not None and cpu < _CPU_SHARE and token_quiet >= limits.quiet_s:
            return HealthState.HUNG, [asked, counter, f"engine processes use {cpu:.1%} of a core"], ""
        busy = "CPU use is not known" if cpu is None else f"engine processes use {cpu:.0%} of a core"
        if token_quiet >= limits.hang_s:
            return HealthState.HUNG, [asked, counter, busy, f"--hang-seconds is {limits.hang_s:.0f}"], ""
        if not self._was_ready and token_quiet >= limits.quiet_s:
            return HealthState.WARMING, [asked, busy], ""
        return HealthState.BUSY, [asked, counter, busy], ""

    def _serves(self, seen: Observation) -> bool:
        if seen.health is None or seen.health.condition is not Condition.UP or seen.token.ok_at is None:
            return False
        if self._own:
            return seen.owner.kind is OwnerKind.OURS and bool(seen.processes)
        return seen.owner.kind is not OwnerKind.NOBODY or not seen.pid_known

    def _ready_evidence(self, seen: Observation) -> list[str]:
        evidence = [seen.token.evidence]
        if seen.health is not None:
            evidence.append(seen.health.evidence)
        if seen.owner.kind is not OwnerKind.NOBODY:
            evidence.append(seen.owner.describe(self._port))
        return evidence

    def _starting(self, seen: Observation) -> tuple[HealthState, list[str], str]:
        health = seen.health
        evidence = [f"stage: {seen.stage}"] if seen.stage else []
        if health is not None:
            evidence.append(health.evidence)
        if seen.token.failure:
            evidence.append(seen.token.failure)
        if self._was_ready and health is not None and health.condition in (Condition.UNHEALTHY, Condition.STARTING):
            return HealthState.HUNG, evidence, ""
        quiet, cpu = self._progress.quiet(seen.at), self._cpu.share(seen.at, self._limits.quiet_s)
        idle = self._cpu.idle_s(seen.at, _CPU_SHARE)
        if seen.processes and min(quiet, idle) >= self._limits.stall_s:
            return (
                HealthState.STALLED,
                [*evidence, f"no progress for {quiet:.0f} s and no CPU time for {idle:.0f} s"],
                "",
            )
        note = ""
        if quiet >= self._limits.quiet_s and cpu is not None and cpu >= _CPU_SHARE:
            note = f"no visible progress for {quiet:.0f} s; CPU at {cpu:.0%} of a core"
        warming = health is not None and health.condition in (Condition.UP, Condition.STARTING) and not health.stage
        return (HealthState.WARMING if warming else HealthState.STARTING), evidence, note


def _nobody(seen: Observation) -> bool:
    """Nothing listens: by the socket table, or (another machine's is not seen) by a refused connection."""
    refused = seen.health is not None and seen.health.condition is Condition.REFUSED
    return refused or (seen.owner.kind is OwnerKind.NOBODY and seen.health is None)


def _stopped(process: Watched) -> str:
    return f"its {process.role} (pid {process.pid}, {process.title[:60].strip()}) is in process state {process.state} (stopped)"


class _Since:
    """When a value last changed."""

    def __init__(self) -> None:
        self._value: object = None
        self._at: float | None = None

    def note(self, at: float, value: object) -> None:
        if self._at is None or value != self._value:
            self._value, self._at = value, at

    def quiet(self, at: float) -> float:
        return 0.0 if self._at is None else at - self._at


class _Rate:
    """The share of a core that a CPU counter used over the last seconds."""

    def __init__(self, keep_s: float = 30.0) -> None:
        self._points: list[tuple[float, float]] = []
        self._keep_s = keep_s
        self._active_at: float | None = None

    def note(self, at: float, value: float) -> None:
        points = self._points
        if points and value < points[-1][1]:
            points.clear()  # a process left: the sum starts anew
        points.append((at, value))
        while len(points) > 2 and points[1][0] < at - self._keep_s:
            points.pop(0)

    def share(self, at: float, window_s: float) -> float | None:
        """Used seconds per second since the newest point at least ``window_s`` old; None before there is one."""
        old = [point for point in self._points if at - point[0] >= window_s]
        if not old:
            return None
        start, value = old[-1]
        return max(0.0, self._points[-1][1] - value) / (at - start)

    def idle_s(self, at: float, share: float) -> float:
        """Seconds since the counter last moved at ``share`` of a core or more, over a second at least."""
        now = self.share(at, 1.0)
        if self._active_at is None or (now is not None and now >= share):
            self._active_at = at
        return at - self._active_at


def moved(before: Activity, after: Activity) -> Activity:
    """What happened between two looks; memory that shrank counts as none grown."""
    return Activity(
        cpu_s=max(0.0, after.cpu_s - before.cpu_s),
        engine_cpu_s=max(0.0, after.engine_cpu_s - before.engine_cpu_s),
        rss_bytes=max(0, after.rss_bytes - before.rss_bytes),
        read_bytes=max(0, after.read_bytes - before.read_bytes),
        log_bytes=max(0, after.log_bytes - before.log_bytes),
    )
