"""A state machine from observations to the state of a server. It uses what was observed and nothing else.

    dead      at once: an essential process is gone, an error line says so, another process took its port
    hung      at once in process state T; else the one-token request is outstanding and for 5 s no token counter
              moves and no engine process uses CPU; or tokens stand still for --hang-seconds while CPU moves
    busy      the one-token request is outstanding, something moves
    stalled   starting, and for --stall-seconds no percentage, log, bytes read, memory growth or CPU time
    ready     its processes are alive, they own the socket, health is 2xx and one real token came
    unknown   nothing listens and no pid is known

The machine remembers when each counter last moved; the time comes with each observation, so tests need no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay.operation.watch.observation import Activity, Observation, OwnerKind, WatchedProcess
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
    """Timeouts, in seconds.

    Attributes:
        quiet_s: without any movement for this long, an outstanding token means a hang.
        hang_s: CPU time but no token for this long is a hang.
        stall_s: a start without any movement for this long is stalled.
        foreign_port_s: another process must hold the port for this long before the run is called dead.
    """

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
    note: str = ""  # activity to show beside the state


# Less than this is noise of timers and garbage collection, and does not count as movement.
_CPU_SHARE = 0.02
_GROWN_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class HealthStateMachine:
    """Turns a series of observations into verdicts.

    Args:
        port: the server's port, for the evidence lines.
        own: the server's process is known, so the port must be held by it.
    """

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

    def update(self, observation: Observation) -> Verdict:
        """The verdict after ``observation``; ``since`` is kept while the state stays the same."""
        self._note_movement(observation)
        state, evidence, note = self._decide(observation)
        before = self._verdict
        since = before.since if before is not None and before.state is state else observation.at
        if state is HealthState.READY:
            self._was_ready = True
        self._verdict = Verdict(state, since, tuple(evidence), note)
        return self._verdict

    def _note_movement(self, observation: Observation) -> None:
        moving = observation.activity
        self._progress.note(
            observation.at,
            (
                observation.stage,
                observation.percent,
                moving.log_bytes,
                moving.rss_bytes // _GROWN_BYTES,
                moving.read_bytes // _READ_BYTES,
            ),
        )
        self._tokens.note(observation.at, moving.tokens)
        self._cpu.note(observation.at, moving.cpu_s)
        self._engine_cpu.note(observation.at, moving.engine_cpu_s)

    def _decide(self, observation: Observation) -> tuple[HealthState, list[str], str]:
        dead = self._dead(observation)
        if dead:
            return HealthState.DEAD, dead, ""
        stopped = [process for process in observation.processes if process.stopped and process.role is not Role.HELPER]
        if stopped:
            return HealthState.HUNG, [_stopped(process) for process in stopped], ""
        if not observation.pid_known and _nobody(observation):
            return HealthState.UNKNOWN, [f"nothing listens on port {self._port}, and no pid is known"], ""
        if observation.paused is not None:
            return HealthState.PAUSED, [observation.paused], ""
        if observation.token.outstanding_since is not None:
            waiting = self._waiting_for_token(observation, observation.token.outstanding_since)
            if waiting is not None:
                return waiting
        if self._serves(observation):
            return HealthState.READY, self._ready_evidence(observation), ""
        if observation.error_line is not None and not self._was_ready:
            return HealthState.DEAD, [f"log: {observation.error_line}"], ""
        return self._starting(observation)

    def _dead(self, observation: Observation) -> list[str]:
        evidence = [lost.describe() for lost in observation.lost]
        if self._own and observation.owner.kind is OwnerKind.OTHER:
            self._foreign_since = observation.at if self._foreign_since is None else self._foreign_since
            if observation.at - self._foreign_since >= self._limits.foreign_port_s:
                evidence.append(
                    f"{observation.owner.describe(self._port)}, which is not this server: it can never serve there"
                )
        else:
            self._foreign_since = None
        if (
            observation.health is not None
            and observation.health.condition is Condition.UNHEALTHY
            and not observation.processes
            and self._was_ready
        ):
            evidence.append(observation.health.evidence)
        return evidence

    def _waiting_for_token(self, observation: Observation, since: float) -> tuple[HealthState, list[str], str] | None:
        waited = observation.at - since
        if waited < self._limits.quiet_s:
            return None
        limits = self._limits
        token_quiet = min(waited, self._tokens.quiet(observation.at))
        cpu = self._engine_cpu.share(observation.at, limits.quiet_s)
        asked = f"a one-token request has been outstanding for {waited:.0f} s"
        counter = "no token counter is known" if observation.activity.tokens is None else (
            f"the token counter stands at {observation.activity.tokens:.0f} for {token_quiet:.0f} s")  # fmt: skip
        if cpu is not None and cpu < _CPU_SHARE and token_quiet >= limits.quiet_s:
            return HealthState.HUNG, [asked, counter, f"engine processes use {cpu:.1%} of a core"], ""
        busy = "CPU use is not known" if cpu is None else f"engine processes use {cpu:.0%} of a core"
        if token_quiet >= limits.hang_s:
            return HealthState.HUNG, [asked, counter, busy, f"--hang-seconds is {limits.hang_s:.0f}"], ""
        if not self._was_ready and token_quiet >= limits.quiet_s:
            return HealthState.WARMING, [asked, busy], ""
        return HealthState.BUSY, [asked, counter, busy], ""

    def _serves(self, observation: Observation) -> bool:
        if (
            observation.health is None
            or observation.health.condition is not Condition.UP
            or observation.token.ok_at is None
        ):
            return False
        if self._own:
            return observation.owner.kind is OwnerKind.OWN and bool(observation.processes)
        return observation.owner.kind is not OwnerKind.NONE or not observation.pid_known

    def _ready_evidence(self, observation: Observation) -> list[str]:
        evidence = [observation.token.evidence]
        if observation.health is not None:
            evidence.append(observation.health.evidence)
        if observation.owner.kind is not OwnerKind.NONE:
            evidence.append(observation.owner.describe(self._port))
        return evidence

    def _starting(self, observation: Observation) -> tuple[HealthState, list[str], str]:
        health = observation.health
        evidence = [f"stage: {observation.stage}"] if observation.stage else []
        if health is not None:
            evidence.append(health.evidence)
        if observation.token.failure:
            evidence.append(observation.token.failure)
        if self._was_ready and health is not None and health.condition in (Condition.UNHEALTHY, Condition.STARTING):
            return HealthState.HUNG, evidence, ""
        quiet, cpu = self._progress.quiet(observation.at), self._cpu.share(observation.at, self._limits.quiet_s)
        idle = self._cpu.idle_s(observation.at, _CPU_SHARE)
        if observation.processes and min(quiet, idle) >= self._limits.stall_s:
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


def _nobody(observation: Observation) -> bool:
    """Nothing listens: by the socket table, or (another machine's is not observation) by a refused connection."""
    refused = observation.health is not None and observation.health.condition is Condition.REFUSED
    return refused or (observation.owner.kind is OwnerKind.NONE and observation.health is None)


def _stopped(process: WatchedProcess) -> str:
    title = process.title[:60].strip()
    return f"its {process.role} (pid {process.pid}, {title}) is in process state {process.state} (stopped)"


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


def activity_between(before: Activity, after: Activity) -> Activity:
    """What moved between two observations; memory that shrank counts as no growth."""
    return Activity(
        cpu_s=max(0.0, after.cpu_s - before.cpu_s),
        engine_cpu_s=max(0.0, after.engine_cpu_s - before.engine_cpu_s),
        rss_bytes=max(0, after.rss_bytes - before.rss_bytes),
        read_bytes=max(0, after.read_bytes - before.read_bytes),
        log_bytes=max(0, after.log_bytes - before.log_bytes),
    )
