"""Watches one server. Used by the supervisor of a run and by ``forebay wait``.

One turn (``step``) reads the log's new lines, samples the processes, sends the requests that are due and updates the
state. What changed comes back as events. Between turns the caller waits on ``wake``, which every answer sets.
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

__all__ = ["Event", "PollIntervals", "Watcher"]

_UP = (HealthState.READY, HealthState.BUSY)


@dataclass(frozen=True, slots=True)
class Event:
    """Something changed. ``fields`` are the JSON of events.jsonl."""

    kind: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PollIntervals:
    """Seconds between two samples or requests of a kind; of a pair the first holds while starting,
    the second while serving.

    While serving a sample costs well under a millisecond and the whole watch under 2 % of a core. The request every
    ``token_s`` finds a hang that no process state shows.
    """

    turn: tuple[float, float] = (0.1, 0.5)
    listening_s: float = 0.05  # a turn between the first listening socket and ready
    sample: tuple[float, float] = (0.3, 0.5)
    scan: tuple[float, float] = (0.5, 10.0)
    health: tuple[float, float] = (0.05, 10.0)
    token_s: float = 30.0
    counters: tuple[float, float] = (2.0, 15.0)
    progress_s: float = 1.0


class Watcher:
    """Watches one server from outside.

    Args:
        api_server: the server's process; None looks up the listener.
        own: the port must be held by ``api_server`` or its children (a run of Forebay, or a pid that was named).
        session: ``api_server`` leads its own session.
        log: the server's log, or None.
        host_pool_bytes: size of all host pools by the plan. Faulting them in writes nothing to the log, so the growth
            of memory against this size is the progress. 0: not known.
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
        intervals: PollIntervals | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._server = server
        self._address = address
        self._own = own
        self._log = log
        self._host_pool_bytes = host_pool_bytes
        self._limits = limits or Limits()
        self._intervals = intervals or PollIntervals()
        self._clock = clock
        self.wake = threading.Event()
        self.sampler = ProcessSampler(machine, server, address, api_server, session=session)
        self.poller = HealthPoller(machine, server, address, clock, self.wake)
        self.health_state = HealthStateMachine(address.port, own=own, limits=self._limits)
        self.stages = StageClock(clock())
        self.verdict = Verdict(HealthState.STARTING, clock(), ())
        self._reported: HealthState | None = None
        self._last_sample: ProcessSample | None = None
        self._sampled_at = self._health_at = self._counters_at = self._progress_at = self._token_at = -1e9
        self._shown: tuple[str, float | None] = ("", None)
        self._doing = ""
        self._was_ready = self._ready_reported = False

    def turn_s(self) -> float:
        """How long the caller may wait before the next turn."""
        listening = self._last_sample is not None and self._last_sample.owner.kind is OwnerKind.OWN
        return min(
            self._interval(self._intervals.turn),
            self._intervals.listening_s if listening and not self._was_ready else 1.0,
        )

    def step(self) -> list[Event]:
        """One turn; returns its events in order."""
        now = self._clock()
        events = self._read_log()
        self._sample(now)
        self._find_listener()
        self._send_due_requests(now)
        observation = self._observation(now)
        self.verdict = self.health_state.update(observation)
        events += self._stage_events(observation, now)
        if self._reported is not self.verdict.state:
            self._reported = self.verdict.state
            events.append(self._verdict_event(self.verdict, now))
            self._sampled_at = -1e9
        return events

    @property
    def stage(self) -> tuple[str, float | None]:
        """The stage now and its percentage, where it has one."""
        return self._shown

    @property
    def activity(self) -> Activity:
        """Sums over the processes at the last sample."""
        return self._last_sample.activity if self._last_sample is not None else Activity()

    def death_observation(self) -> DeathObservation:
        """The processes that are gone, in order, and who holds the port."""
        sample = self._last_sample
        return DeathObservation() if sample is None else DeathObservation(sample.lost, sample.owner)

    def _interval(self, pair: tuple[float, float]) -> float:
        return pair[1] if self.verdict.state in (*_UP, HealthState.PAUSED) else pair[0]

    def _read_log(self) -> list[Event]:
        return [] if self._log is None else [Event("log", {"line": text}) for text in self._log.read()]

    def _sample(self, now: float) -> None:
        if now - self._sampled_at >= self._interval(self._intervals.sample):
            self._sampled_at = now
            self._last_sample = self.sampler.sample(now, scan_s=self._interval(self._intervals.scan))

    def _find_listener(self) -> None:
        """Without a named pid the listener is the server, and a new listener is a new server."""
        sample = self._last_sample
        if self._own or sample is None or sample.owner.pid is None or sample.owner.kind is not OwnerKind.OTHER:
            return
        api_server = identify(self._machine, sample.owner.pid)
        if api_server is not None:
            if self.sampler.api_server is not None and api_server != self.sampler.api_server:
                self.poller.reset()
            self.sampler.follow(api_server)
            self._sampled_at = -1e9
            self._last_sample = ProcessSample(
                (), (), sample.activity, Owner(OwnerKind.OWN, sample.owner.pid, sample.owner.command)
            )

    def _send_due_requests(self, now: float) -> None:
        poller, owner = self.poller, self._last_sample.owner if self._last_sample is not None else Owner(OwnerKind.NONE)
        owned = owner.kind is OwnerKind.OWN or (not self._own and owner.kind is OwnerKind.HIDDEN)
        if self._own and not owned and owner.kind is not OwnerKind.HIDDEN:
            # while no process of this server listens, an answer would come from another one; sampling each turn is
            # cheap
            self._sampled_at = -1e9 if owner.kind is OwnerKind.NONE else self._sampled_at
            return
        if now - self._health_at >= self._interval(self._intervals.health):
            self._health_at = now
            poller.poll_health()
        up = self.verdict.state in _UP
        due = now - self._token_at >= self._intervals.token_s if up else poller.token.ok_at is None
        if poller.should_request_token and due:
            self._token_at = now
            poller.request_token()
        if poller.health_pending_s >= 1.0 or poller.paused is not None:
            poller.poll_pause()
        answers = poller.health is not None and poller.health.condition is not Condition.REFUSED
        if answers and now - self._counters_at >= self._interval(self._intervals.counters):
            self._counters_at = now
            poller.poll_counters()

    def _observation(self, now: float) -> Observation:
        sample = self._last_sample or ProcessSample((), (), Activity(), Owner(OwnerKind.NONE))
        poller, log = self.poller, self._log
        stage, percent = self._stage()
        counters = poller.counters
        activity = Activity(
            sample.activity.cpu_s, sample.activity.engine_cpu_s, sample.activity.rss_bytes, sample.activity.read_bytes,
            log.size_bytes if log is not None else 0, counters.tokens if counters is not None else None,
        )  # fmt: skip
        paused = poller.paused
        if paused is None and counters is not None and counters.paused:
            paused = f"/metrics counts {counters.paused:.0f} paused requests"
        return Observation(
            at=now,
            pid_known=self.sampler.api_server is not None,
            processes=sample.processes,
            lost=sample.lost,
            owner=sample.owner,
            health=poller.health,
            token=poller.token,
            activity=activity,
            stage=stage,
            percent=percent,
            error_line=log.error_line if log is not None else None,
            paused=paused,
        )

    def _stage(self) -> tuple[str, float | None]:
        """The stage by the server's health answer, else by its log, else by its process."""
        health, log = self.poller.health, self._log
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

    def _stage_events(self, observation: Observation, now: float) -> list[Event]:
        self._was_ready = self._was_ready or self.verdict.state is HealthState.READY
        name = "ready" if self._was_ready else observation.stage
        events: list[Event] = []
        if name and name != self._shown[0]:
            self.stages.enter(name, now, observation.activity)
            events.append(Event("stage", {"stage": name, "percent": observation.percent}))
        elif (
            now - self._progress_at >= self._intervals.progress_s
            and not self._was_ready
            and self.verdict.state is not HealthState.DEAD
        ):
            self._progress_at = now
            events.append(Event("progress", self._progress(observation, now)))
        self._shown = (name, observation.percent)
        doing = self._log.doing if self._log is not None and not self._was_ready else ""
        if doing and doing != self._doing:
            events.append(Event("doing", {"stage": name, "doing": doing}))
        self._doing = doing
        return events

    def _progress(self, observation: Observation, now: float) -> dict[str, object]:
        moved, seconds = self.stages.current(now, observation.activity)
        left = None
        if observation.percent and 0 < observation.percent < 100:
            left = round(seconds * (100 - observation.percent) / observation.percent, 1)
        return {
            "stage": self._shown[0] or observation.stage,
            "percent": observation.percent,
            "stage_s": round(seconds, 1),
            "left_s": left,
            "rss_bytes": observation.activity.rss_bytes,
            "grown_bytes_per_s": round(moved.rss_bytes / seconds) if seconds > 0.5 else 0,
            "read_bytes_per_s": round(moved.read_bytes / seconds) if seconds > 0.5 else 0,
            "cpu": round(moved.cpu_s / seconds, 2) if seconds > 0.5 else 0.0,
            "note": self.verdict.note,
        }

    def _verdict_event(self, verdict: Verdict, now: float) -> Event:
        fields: dict[str, object] = {"evidence": list(verdict.evidence), "stage": self._shown[0]}
        if verdict.state is HealthState.READY:
            if not self._ready_reported:
                fields["after_s"] = round(now - self.stages.began, 2)
            self._ready_reported = True
            if self._last_sample is not None and self._last_sample.owner.pid is not None:
                fields["owner"] = {"pid": self._last_sample.owner.pid, "command": self._last_sample.owner.command[:200]}
        return Event(verdict.state.value, fields)
