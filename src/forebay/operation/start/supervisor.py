"""The small process beside a server: starts it, reaps it, watches it, and writes down what happens.

    python -m forebay.operation.start.supervisor RUN_FOLDER

It leads a session of its own, so it survives the terminal; the server leads another, so that one signal never reaches
both. As the subreaper it becomes the parent of the server's orphans (a vLLM engine whose API server was SIGKILLed), so
none stays a zombie. It never restarts anything. SIGTERM makes it end the run. It ends with the last process of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from forebay.errors import DeadError, RefusedError
from forebay.machine.interface import Child, Machine
from forebay.machine.local import LocalMachine
from forebay.machine.processes import identify
from forebay.machine.shm import shm_files
from forebay.operation.start.launcher import SUPERVISOR_BUNDLE
from forebay.operation.watch.health_state import HealthState, Limits
from forebay.operation.watch.log_follower import LogFollower
from forebay.operation.watch.observation import describe_exit
from forebay.operation.watch.stage_times import compare, seconds_per_stage
from forebay.operation.watch.watcher import Event, Watcher
from forebay.paths import home_dir
from forebay.runs.run_record import Run, RunRecord
from forebay.runs.start_times import earlier_start_times, note_start_times
from forebay.servers.argv_flags import flag_value
from forebay.servers.http_client import Address
from forebay.servers.registry import server_named

__all__ = ["RUN_ID_VARIABLE", "Supervisor", "main"]

RUN_ID_VARIABLE = "FOREBAY_RUN_ID"
_PR_SET_CHILD_SUBREAPER = 36
_SETTLE_S = 0.8  # after a death the log's last lines are still being written
_SHM_S = 60.0


def launch(run: Run, machine: Machine, limits: Limits) -> tuple[Child, Watcher]:
    """Start the server of ``run`` and put its processes on the record.

    Raises:
        DeadError: its program could not be started.
    """
    record = run.read()
    environment = {**os.environ, **record.env, RUN_ID_VARIABLE: record.run_id}
    try:
        child = machine.spawn(record.command, env=environment, cwd=None, log_path=str(run.log_path))
    except OSError as error:
        why = f"{record.command[0]} could not be started: {error}"
        run.update(lambda now: _end(now, "dead", evidence=[why]))
        run.event("dead", evidence=[why])
        raise DeadError(why) from error
    api_server, me = identify(machine, child.pid), identify(machine, os.getpid())
    log = LogFollower(machine, str(run.log_path), record.server)
    address = Address(record.client_host, record.port, api_key=_api_key(record))
    watcher = Watcher(
        machine, server_named(record.server), address, api_server=api_server, own=True, session=True, log=log,
        limits=limits, host_pool_bytes=_planned_host_bytes(run),
    )  # fmt: skip

    def launched(now: RunRecord) -> None:
        now.api_server, now.supervisor, now.state, now.state_since = api_server, me, "starting", time.time()

    run.update(launched)
    run.event("launched", pid=child.pid, command=record.command)
    return child, watcher


class Supervisor:
    """One run, from its launch to its last process."""

    def __init__(self, run: Run, machine: Machine, child: Child, watcher: Watcher) -> None:
        self._run = run
        self._machine = machine
        self._child = child
        self._watcher = watcher
        self._record = run.read()
        self._stop_asked = False
        self._dead_since: float | None = None
        self._death_reported = False
        self._shm_at = -1e9
        self._known: dict[str, str] = {}

    def run(self) -> None:
        """Watch, and stay until nothing of the run is left."""
        while not self._finished():
            self._watcher.wake.wait(self._watcher.turn_s())
            self._watcher.wake.clear()
            self._turn()
        self._run.update(lambda now: setattr(now, "ended_at", now.ended_at or time.time()))
        for name in ("secrets.yaml", SUPERVISOR_BUNDLE):
            (self._run.folder / name).unlink(missing_ok=True)

    def _turn(self) -> None:
        watcher = self._watcher
        code = self._child.poll()
        if code is not None and self._record.exit_code is None:
            watcher.sampler.ended(code)
            self._record = self._run.update(lambda now: setattr(now, "exit_code", code))
            self._run.event("exited", exit_code=code, how=describe_exit(code))
        self._reap()
        for event in watcher.step():
            self._record_event(event)
        self._record_members()
        self._check_death(code is not None)
        self._record_shared_memory()
        if self._stop_asked:
            self._stop_asked = False
            self._end_run()

    def _record_event(self, event: Event) -> None:
        """Write the record before the event, so that a reader of the event finds the new state in the record."""
        if event.kind == HealthState.DEAD:
            return  # reported by _report_death, after the exit code and the last log lines have arrived
        if event.kind == "stage":
            self._write_state(self._record.state)
        elif event.kind in HealthState.__members__.values():
            self._write_state(event.kind)
        self._run.event(event.kind, **event.fields)

    def _write_state(self, state: str) -> None:
        watcher = self._watcher
        stage, percent = watcher.stage
        evidence = list(watcher.verdict.evidence)
        ready_now = state == HealthState.READY and self._record.ready_after_s is None
        stages = list(watcher.stages.done)
        if ready_now:
            stages = compare(stages, earlier_start_times(self._record.server, self._record.model))
            note_start_times(self._record.server, self._record.model, seconds_per_stage(stages))

        def change(now: RunRecord) -> None:
            if now.state != state:
                now.state, now.state_since = state, time.time()
            now.stage, now.percent, now.evidence = stage, percent, evidence
            if now.ready_after_s is None:
                now.stages = stages
            if ready_now:
                now.ready_after_s = round(time.monotonic() - watcher.stages.began, 2)

        self._record = self._run.update(change)

    def _record_members(self) -> None:
        """Write down the run's processes while they live: ``down`` recognises orphans by this list."""
        sampler = self._watcher.sampler
        identities, names = sampler.identities(), sampler.names()
        if names == self._known:
            return
        self._known = names

        def change(now: RunRecord) -> None:
            now.members, now.member_names = identities, {**now.member_names, **names}

        self._record = self._run.update(change)

    def _check_death(self, api_server_gone: bool) -> None:
        watcher = self._watcher
        if watcher.verdict.state is not HealthState.DEAD or self._death_reported:
            self._dead_since = None if watcher.verdict.state is not HealthState.DEAD else self._dead_since
            return
        now = time.monotonic()
        self._dead_since = now if self._dead_since is None else self._dead_since
        settled = now - self._dead_since >= (_SETTLE_S / 2 if api_server_gone else _SETTLE_S)
        if settled:
            self._death_reported = True
            self._report_death()

    def _report_death(self) -> None:
        from forebay.operation.doctor.run_diagnosis import diagnose_run  # large tables, needed only after a death

        watcher = self._watcher
        asked = self._run.read().stop_requested_at is not None
        evidence = list(watcher.verdict.evidence)
        if asked:
            self._record = self._run.update(lambda now: _end(now, "stopped", evidence=evidence))
            self._run.event("stopped", evidence=evidence)
            return
        self._write_state("dead")
        diagnosis = diagnose_run(self._run, self._machine, watcher.death_observation())

        def change(now: RunRecord) -> None:
            _end(now, "dead", evidence=evidence)
            now.cause = diagnosis.cause

        self._record = self._run.update(change)
        self._run.event("dead", evidence=evidence, exit_code=self._record.exit_code, **diagnosis.fields())

    def _record_shared_memory(self) -> None:
        """Write down the run's files in /dev/shm while its processes map them; later the owner cannot be told."""
        watcher = self._watcher
        now = time.monotonic()
        settled = watcher.verdict.state in (HealthState.READY, HealthState.BUSY)
        if now - self._shm_at < (_SHM_S if settled else 5.0) or not watcher.sampler.members:
            return
        self._shm_at = now
        members = set(watcher.sampler.members)
        before = set(self._record.baseline.shm_names) if self._record.baseline is not None else set()
        fresh = [file for file in shm_files(self._machine, mappers=False) if file.name not in before]
        if all(file.name in self._record.shm_names for file in fresh):
            return
        mapped = [file.name for file in shm_files(self._machine) if members & set(file.pids or ())]
        new = sorted(set(mapped) - set(self._record.shm_names) - before)
        if new:
            self._record = self._run.update(lambda now: now.shm_names.extend(new))

    def _reap(self) -> None:
        """Reap orphans of the run that became children of this process; the API server is reaped by ``Child.poll``."""
        watcher, child = self._watcher, self._child
        for info in list(watcher.sampler.members.values()):
            if info.is_zombie and info.ppid == os.getpid() and info.pid != child.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(info.pid, os.WNOHANG)

    def _finished(self) -> bool:
        watcher = self._watcher
        return self._death_reported and self._record.exit_code is not None and not watcher.sampler.members

    def request_stop(self, _number: int, _frame: FrameType | None) -> None:
        """Handler of SIGTERM and SIGINT: end the run."""
        self._stop_asked = True
        self._watcher.wake.set()

    def _end_run(self) -> None:
        """End the run in a thread, while this one goes on watching and reaping."""
        import threading

        from forebay.operation.stop.stop_run import stop_run

        threading.Thread(target=stop_run, args=(self._machine, self._run), daemon=True).start()


def _end(record: RunRecord, state: str, *, evidence: list[str]) -> None:
    record.state, record.state_since, record.evidence = state, time.time(), evidence
    record.ended_at = record.ended_at or time.time()


def _api_key(record: RunRecord) -> str:
    """The key that the server was given, for the watcher's requests: from the environment or the file of secrets."""
    variable = server_named(record.server).api_key_variable
    if variable:
        return os.environ.get(variable, "")
    path = flag_value(record.command, "--config")
    try:
        return str(json.loads(Path(path).read_bytes()).get("api-key", "")) if path else ""
    except (OSError, ValueError, AttributeError):
        return ""


def _planned_host_bytes(run: Run) -> int:
    """Size of all host pools by the run's plan; 0 without a plan."""
    try:
        plan = json.loads(run.plan_path.read_bytes())
        return int(plan["host"]["total_bytes"] or 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


@contextlib.contextmanager
def _port_lock(port: int) -> Iterator[None]:
    """Hold the lock of a port: two vLLMs that load at once both bind it, and one never listens."""
    folder = home_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"port-{port}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(f"another run is starting or serving on port {port}") from None
        yield


def main(folder: str, options: Sequence[str]) -> None:
    """Entry point of the process.

    Args:
        options: the timeouts, as the launcher passes them: ``hang=120 stall=300``.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run, machine = Run(Path(folder)), LocalMachine()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with _port_lock(run.read().port):
        supervisor = Supervisor(run, machine, *launch(run, machine, _limits(options)))
        signal.signal(signal.SIGTERM, supervisor.request_stop)
        signal.signal(signal.SIGINT, supervisor.request_stop)
        supervisor.run()


def _limits(options: Sequence[str]) -> Limits:
    """The timeouts that the launcher passes on the command line: ``hang=120 stall=300``."""
    given = dict(word.split("=", 1) for word in options)
    base = Limits()
    return Limits(
        base.quiet_s,
        float(given.get("hang", base.hang_s)),
        float(given.get("stall", base.stall_s)),
        base.foreign_port_s,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
