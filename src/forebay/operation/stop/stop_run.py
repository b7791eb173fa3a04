"""End a run: only what it owns, in the order that leaves nothing behind, and then check that nothing is left.

A run owns the session it was launched into, the processes on its record (pid, start time and boot id) with their
descendants, and every process with the run's id in its environment. A name never decides.

The order: SIGTERM to the API server, time to drain, SIGKILL; then the engines that outlived it, then everything else;
the resource tracker of multiprocessing last, because it is the one that unlinks the shared memory.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.machine.interface import Machine
from forebay.machine.memory import read_memory
from forebay.machine.processes import (
    ProcessId,
    ProcessInfo,
    boot_id,
    is_running,
    read_process,
    send_signal,
)
from forebay.operation.stop.cleanup_check import CleanupReport, check_cleanup
from forebay.runs.owned_processes import owned_processes
from forebay.runs.run_record import Run, RunRecord
from forebay.servers.base import ProcessView, Role, ShutdownPolicy
from forebay.servers.registry import server_named

__all__ = ["StopReport", "stop_run"]

_TURN_S = 0.1
_TRACKER_S = 5.0
_REAP_S = 3.0
_SERVING = ("ready", "busy", "paused", "hung")


@dataclass
class StopReport:
    """The steps taken, and whether anything is left."""

    steps: list[str] = field(default_factory=list)
    cleanup: CleanupReport | None = None

    @property
    def clean(self) -> bool:
        """Nothing of the run is left."""
        return self.cleanup is not None and self.cleanup.clean


def stop_run(
    machine: Machine,
    run: Run,
    *,
    drain_s: float | None = None,
    tell: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> StopReport:
    """End ``run`` and check that nothing is left.

    Works without its supervisor, after a SIGKILL of the API server and after a reboot.

    Args:
        drain_s: seconds a serving server may take to finish its requests; None: as its ``ShutdownPolicy`` says.
        tell: called with each step as it is taken.
    """
    record = run.update(lambda now: setattr(now, "stop_requested_at", now.stop_requested_at or time.time()))
    before = read_memory(machine)
    sequence = _StopSequence(machine, record, tell, clock, sleep)
    if record.api_server is not None and record.api_server.boot_id != boot_id(machine):
        sequence.say("the machine has been rebooted since: no process of the run can be left")
    else:
        sequence.end_api_server(drain_s)
        sequence.end_engines()
        sequence.end_rest()
        sequence.end_supervisor()
    cleanup = check_cleanup(machine, run, record, sequence.remaining(), before)
    for line in cleanup.lines():
        tell(line)
    run.update(_closed if cleanup.clean else (lambda now: None))
    run.event("down", clean=cleanup.clean, steps=sequence.report.steps, cleanup=cleanup.lines())
    sequence.report.cleanup = cleanup
    return sequence.report


def _closed(record: RunRecord) -> None:
    record.state = record.state if record.state == "dead" else "stopped"
    record.ended_at = record.ended_at or time.time()
    record.members = []


class _StopSequence:
    """The steps of one stop."""

    def __init__(
        self,
        machine: Machine,
        record: RunRecord,
        tell: Callable[[str], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._machine = machine
        self._record = record
        self._server = server_named(record.server)
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self.report = StopReport()

    def say(self, text: str) -> None:
        self.report.steps.append(text)
        self._tell(text)

    @property
    def _policy(self) -> ShutdownPolicy:
        return self._server.shutdown_policy

    def remaining(self) -> list[ProcessInfo]:
        """What is left of the run, zombies included."""
        return owned_processes(self._machine, self._record, environments=True)

    def end_api_server(self, drain_s: float | None) -> None:
        """SIGTERM, drain, SIGKILL for the process that was launched."""
        api_server = self._record.api_server
        if api_server is None or not is_running(self._machine, api_server):
            return
        serving = self._record.state in _SERVING
        grace_s = drain_s if drain_s is not None else self._policy.drain_s
        if not serving:
            grace_s = min(grace_s, 10.0)
        self._signal(api_server, signal.SIGTERM, "API server")
        info = read_process(self._machine, api_server.pid)
        if info is not None and info.is_stopped:
            self._signal(api_server, signal.SIGCONT, "API server")  # a stopped process takes no SIGTERM
        repeat_at = self._clock() + self._policy.repeat_term_s
        deadline = self._clock() + grace_s
        while is_running(self._machine, api_server) and self._clock() < deadline:
            if not serving and self._clock() >= repeat_at:
                repeat_at = self._clock() + self._policy.repeat_term_s
                self._again_while_loading(api_server)
            self._sleep(_TURN_S)
        if is_running(self._machine, api_server):
            self.say(f"the API server did not end within {grace_s:.0f} s")
            self._signal(api_server, signal.SIGKILL, "API server")
            self._wait(lambda: is_running(self._machine, api_server), 5.0)

    def _again_while_loading(self, api_server: ProcessId) -> None:
        """A loading server may ignore one SIGTERM: kill its engine, which ends the API server too,
        or repeat SIGTERM.
        """
        engines = self._with_roles(Role.ENGINE) if self._policy.loading_kills_engine else []
        for engine in engines:
            self._signal(engine, signal.SIGKILL, "engine, still loading")
        if not engines:
            self._signal(api_server, signal.SIGTERM, "API server, again")

    def end_engines(self) -> None:
        """Engines that outlive their API server: SIGTERM first, so that they free shared memory themselves."""
        engines = self._with_roles(Role.ENGINE)
        if not engines:
            return
        self._wait(lambda: bool(self._with_roles(Role.ENGINE)), 1.0)
        for engine in self._with_roles(Role.ENGINE):
            self._signal(engine, signal.SIGTERM, "engine without an API server")
            info = read_process(self._machine, engine.pid)
            if info is not None and info.is_stopped:
                self._signal(engine, signal.SIGCONT, "engine")
        self._wait(lambda: bool(self._with_roles(Role.ENGINE)), self._policy.engine_term_s)
        for engine in self._with_roles(Role.ENGINE):
            self._signal(engine, signal.SIGKILL, "engine")

    def end_rest(self) -> None:
        """Workers and helpers, and the resource trackers last."""
        self._wait(lambda: bool(self._living(trackers=False)), 3.0)
        for process in self._living(trackers=False):
            self._signal(process, signal.SIGKILL, "process of the run")
        self._wait(lambda: bool(self._living(trackers=True)), _TRACKER_S)
        for process in self._living(trackers=True):
            self._signal(process, signal.SIGKILL, "resource tracker")
        self._wait(lambda: bool(self.remaining()), _REAP_S)

    def end_supervisor(self) -> None:
        """It ends by itself once its run is gone; one that does not is killed."""
        supervisor = self._record.supervisor
        if supervisor is None or _is_this_process(supervisor):
            return
        self._wait(lambda: is_running(self._machine, supervisor), 4.0)
        if is_running(self._machine, supervisor):
            self._signal(supervisor, signal.SIGKILL, "supervisor")
            self._wait(lambda: bool(self.remaining()), _REAP_S)

    def _with_roles(self, *wanted: Role) -> list[ProcessId]:
        living = [info for info in owned_processes(self._machine, self._record) if not info.is_zombie]
        api_server = self._record.api_server.pid if self._record.api_server is not None else 0
        views = [ProcessView(info.pid, info.ppid, info.name, info.command) for info in living]
        roles = self._server.roles(views, api_server)
        return [self._identity(info) for info in living if roles.get(info.pid) in wanted]

    def _living(self, *, trackers: bool) -> list[ProcessId]:
        kept = [role for role in Role if trackers or role is not Role.TRACKER]
        return self._with_roles(*kept)

    def _identity(self, info: ProcessInfo) -> ProcessId:
        assert self._record.api_server is not None
        return ProcessId(info.pid, info.start_ticks, self._record.api_server.boot_id)

    def _signal(self, who: ProcessId, number: signal.Signals, what: str) -> None:
        try:
            sent = send_signal(self._machine, who, number)
        except PermissionError:
            self.say(f"not permitted to send {number.name} to pid {who.pid} ({what})")
            return
        if sent and number is not signal.SIGCONT:
            self.say(f"{number.name} to the {what} (pid {who.pid})")

    def _wait(self, still: Callable[[], bool], seconds: float) -> None:
        deadline = self._clock() + seconds
        while self._clock() < deadline and still():
            self._sleep(_TURN_S)


def _is_this_process(who: ProcessId) -> bool:
    import os

    return who.pid == os.getpid()
