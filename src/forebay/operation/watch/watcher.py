"""The watch over one server: look, ask, judge, tell. Used by the supervisor of a run and by ``forebay wait``.

One turn (``step``) samples the processes, reads the log's new lines, sends the requests that are due, and judges. What
changed comes back as events. Between turns the caller waits on ``wake``, which every answer sets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.machine.interface import Machine
from forebay.machine.processes import ProcessId, identify
from forebay.operation.watch.health_poller import HealthPoller
from forebay.operation.watch.health_state import HealthState, HealthStateMachine, Limits, Verdict
from forebay.operation.watch.log_follower import LogFollower
from forebay.operation.watch.observation import Activity, DeathObservation, Observation, Owner, OwnerKind
from forebay.operation.watch.process_sampler import ProcessSample, ProcessSampler
from forebay.operation.watch.stage_times import StageClock
from forebay.servers.base import Condition, Server
from forebay.servers.http_client import Address
from forebay.servers.log_patterns.pattern import Stage

__all__ = ["Event", "Pace", "Watcher"]

_UP = (HealthState.READY, HealthState.BUSY)


@dataclass(frozen=True, slots=True)
class Event:
    """Something changed. ``fields`` are the JSON of events.jsonl."""

    kind: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pace:
    """How often what is looked at, in seconds: first while starting, then while serving.

    While serving a look costs well under a millisecond and the whole watch under 2 % of a core; ``token_s`` is the pulse that
    finds a hang which no process state shows.
    """

    turn: tuple[float, float] = (0.1, 0.5)
    listening_s: float = 0.05  # between the first listening socket and ready: what happens now is what is waited for
    sample: tuple[float, float] = (0.3, 0.5)
    scan: tuple[float, float] = (0.5, 10.0)
    health: tuple[float, float] = (0.05, 10.0)
    token_s: float = 30.0
    counters: tuple[float, float] = (2.0, 15.0)
    progress_s: float = 1.0


class Watcher:
    """Watches one server from outside.

    Args:
        api_server: the process that must be it; None looks up whoever listens.
        own: the port must be ``api_server``'s own (a run of ours, or a pid that was named).
        session: ``api_server`` leads its own session.
        log: the server's log, or None.
        host_pool_bytes: what the plan says the host pools take in total: faulting them in is silent in the log, and
            memory growth against it is the progress. 0: not known.
    """

    def __init__(
        self,
        machine: Machine,
        server: Server,
        address: Address,
        *,
        api_server: ProcessId | None,
        own: bool,
        session: bool = False,
        log: LogFollower | None = None,
        host_pool_bytes: int = 0,
        limits: Limits | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._server = server
        self._address = address
        self._own = own
        self._log = log
        self._host_pool_bytes = host_pool_bytes
        self._limits = limits or Limits()
        self._pace = pace or Pace()
        self._clock = clock
        self.wake = threading.Event()
        self.sampler = ProcessSampler(machine, server, address, api_server, session=session)
        self.prober = HealthPoller(machine, server, address, clock, self.wake)
        self.judge = HealthStateMachine(address.port, own=own, limits=self._limits)
        self.stages = StageClock(clock())
        self.verdict = Verdict(HealthState.STARTING, clock(), ())
        self._told: HealthState | None = None
        self._look: ProcessSample | None = None
        self._sampled_at = self._health_at = self._counters_at = self._progress_at = self._token_at = -1e9
        self._shown: tuple[str, float | None] = ("", None)
        self._doing = ""
        self._was_ready = self._told_ready = False

    def turn_s(self) -> float:
        """How long the caller may wait before the next turn."""
        listening = self._look is not None and self._look.owner.kind is OwnerKind.OURS
        return min(
            self._now_pace(self._pace.turn), self._pace.listening_s if listening and not self._was_ready else 1.0
        )

    def step(self) -> list[Event]:
        """One turn; the events it brought, in order."""
        now = self._clock()
        events = self._read_log()
        self._sample(now)
        self._find_listener()
        self._ask(now)
        seen = self._observation(now)
        self.verdict = self.judge.look(seen)
        events += self._stage_events(seen, now)
        if self._told is not self.verdict.state:
            self._told = self.verdict.state
            events.append(self._verdict_event(self.verdict, now))
            self._sampled_at = -1e9
        return events

    @property
    def stage(self) -> tuple[str, float | None]:
        """The stage now and its percentage, where it has one."""
        return self._shown

    @property
    def activity(self) -> Activity:
        """Sums over the processes at the last look."""
        return self._look.activity if self._look is not None else Activity()

    def seen(self) -> DeathObservation:
        """What the watch saw of a death."""
        look = self._look
        return DeathObservation() if look is None else DeathObservation(look.lost, look.owner)

    def _now_pace(self, pair: tuple[float, float]) -> float:
        return pair[1] if self.verdict.state in (*_UP, HealthState.PAUSED) else pair[0]

    def _read_log(self) -> list[Event]:
        return [] if self._log is None else [Event("log", {"line": text}) for text in self._log.read()]

    def _sample(self, now: float) -> None:
        if now - self._sampled_at >= self._now_pace(self._pace.sample):
            self._sampled_at = now
            self._look = self.sampler.look(now, scan_s=self._now_pace(self._pace.scan))

    def _find_listener(self) -> None:
        """Without a named pid whoever listens is the server; a new listener is a new server."""
        look = self._look
        if self._own or look is None or look.owner.pid is None or look.owner.kind is not OwnerKind.OTHER:
            return
        api_server = identify(self._machine, look.owner.pid)
        if api_server is not None:
            if self.sampler.api_server is not None and api_server != self.sampler.api_server:
                self.prober.forget()
            self.sampler.follow(api_server)
            self._sampled_at = -1e9
            self._look = ProcessSample((), (), look.activity, Owner(OwnerKind.OURS, look.owner.pid, look.owner.command))

    def _ask(self, now: float) -> None:
        prober, owner = self.prober, self._look.owner if self._look is not None else Owner(OwnerKind.NOBODY)
        ours = owner.kind is OwnerKind.OURS or (not self._own and owner.kind is OwnerKind.HIDDEN)
        if self._own and not ours and owner.kind is not OwnerKind.HIDDEN:
            # while nothing of ours listens, an answer would be a stranger's; a look every turn is cheap enough
            self._sampled_at = -1e9 if owner.kind is OwnerKind.NOBODY else self._sampled_at
            return
        if now - self._health_at >= self._now_pace(self._pace.health):
            self._health_at = now
            prober.ask_health()
        up = self.verdict.state in _UP
        due = now - self._token_at >= self._pace.token_s if up else prober.token.ok_at is None
        if prober.worth_a_token and due:
            self._token_at = now
            prober.ask_token()
        if prober.health_pending_s >= 1.0 or prober.paused is not None:
            prober.ask_pause()
        answers = prober.health is not None and prober.health.condition is not Condition.REFUSED
        if answers and now - self._counters_at >= self._now_pace(self._pace.counters):
            self._counters_at = now
            prober.ask_counters()

    def _observation(self, now: float) -> Observation:
        look = self._look or ProcessSample((), (), Activity(), Owner(OwnerKind.NOBODY))
        prober, log = self.prober, self._log
        stage, percent = self._stage()
        counters = prober.counters
        activity = Activity(
            look.activity.cpu_s, look.activity.engine_cpu_s, look.activity.rss_bytes, look.activity.read_bytes,
            log.size_bytes if log is not None else 0, counters.tokens if counters is not None else None,
        )  # fmt: skip
        paused = prober.paused
        if paused is None and counters is not None and counters.paused:
            paused = f"/metrics counts {counters.paused:.0f} paused requests"
        return Observation(
            at=now,
            pid_known=self.sampler.api_server is not None,
            processes=look.processes,
            lost=look.lost,
            owner=look.owner,
            health=prober.health,
            token=prober.token,
            activity=activity,
            stage=stage,
            percent=percent,
            error_line=log.error_line if log is not None else None,
            paused=paused,
        )

    def _stage(self) -> tuple[str, float | None]:
        """The server's own word in its health answer, else its log's, else what the socket shows."""
        health, log = self.prober.health, self._log
        if health is not None and health.stage:
            return health.stage, health.percent
        if log is not None and log.stage:
            return log.stage, log.percent if log.percent is not None else self._faulted_in(log.stage)
        return "launched" if self.sampler.api_server is not None else "", None

    def _faulted_in(self, stage: str) -> float | None:
        if stage != Stage.HOST_POOL or not self._host_pool_bytes or self._shown[0] != stage:
            return None
        grown, _ = self.stages.current(self._clock(), self.activity)
        return min(99.0, round(100 * grown.rss_bytes / self._host_pool_bytes, 1))

    def _stage_events(self, seen: Observation, now: float) -> list[Event]:
        self._was_ready = self._was_ready or self.verdict.state is HealthState.READY
        name = "ready" if self._was_ready else seen.stage
        events: list[Event] = []
        if name and name != self._shown[0]:
            self.stages.enter(name, now, seen.activity)
            events.append(Event("stage", {"stage": name, "percent": seen.percent}))
        elif (
            now - self._progress_at >= self._pace.progress_s
            and not self._was_ready
            and self.verdict.state is not HealthState.DEAD
        ):
            self._progress_at = now
            events.append(Event("progress", self._progress(seen, now)))
        self._shown = (name, seen.percent)
        doing = self._log.doing if self._log is not None and not self._was_ready else ""
        if doing and doing != self._doing:
            events.append(Event("doing", {"stage": name, "doing": doing}))
        self._doing = doing
        return events

    def _progress(self, seen: Observation, now: float) -> dict[str, object]:
        moved, seconds = self.stages.current(now, seen.activity)
        left = None
        if seen.percent and 0 < seen.percent < 100:
            left = round(seconds * (100 - seen.percent) / seen.percent, 1)
        return {
            "stage": self._shown[0] or seen.stage,
            "percent": seen.percent,
            "stage_s": round(seconds, 1),
            "left_s": left,
            "rss_bytes": seen.activity.rss_bytes,
            "grown_bytes_per_s": round(moved.rss_bytes / seconds) if seconds > 0.5 else 0,
            "read_bytes_per_s": round(moved.read_bytes / seconds) if seconds > 0.5 else 0,
            "cpu": round(moved.cpu_s / seconds, 2) if seconds > 0.5 else 0.0,
            "note": self.verdict.note,
        }

    def _verdict_event(self, verdict: Verdict, now: float) -> Event:
        fields: dict[str, object] = {"evidence": list(verdict.evidence), "stage": self._shown[0]}
        if verdict.state is HealthState.READY:
            if not self._told_ready:
                fields["after_s"] = round(now - self.stages.began, 2)
            self._told_ready = True
            if self._look is not None and self._look.owner.pid is not None:
                fields["owner"] = {"pid": self._look.owner.pid, "command": self._look.owner.command[:200]}
        return Event(verdict.state.value, fields)
