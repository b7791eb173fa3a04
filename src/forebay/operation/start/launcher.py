"""Write the record of a run and start its supervisor, which outlives this process and starts the server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipimport import zipimporter

from forebay.errors import DeadError, UsageError
from forebay.machine.interface import GpuReading, Machine
from forebay.operation.start.preflight import baseline
from forebay.operation.watch.health_state import Limits
from forebay.paths import home_dir, runs_dir
from forebay.runs.earlier_runs import KEPT_IN_ALL, KEPT_PER_NAME, prune_runs
from forebay.runs.owned_processes import owned_processes
from forebay.runs.run_record import Run, RunRecord, create_run, this_operator, write_private
from forebay.servers.base import Launch

__all__ = ["SUPERVISOR_BUNDLE", "LaunchRequest", "launch_run", "start_lock", "supervisor_command"]

SUPERVISOR_BUNDLE = "supervisor.pyz"
_LAUNCH_S = 60.0


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What to launch, under which name. ``started_by``: ``user@host`` where the command was typed."""

    name: str
    server: str
    model: str
    version: str
    host: str
    port: int
    launch: Launch
    asked: Mapping[str, str]
    started_by: str = ""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@contextlib.contextmanager
def start_lock(run_id: str) -> Iterator[None]:
    """Held while a run is planned and launched: who comes back after a lost connection waits for its predecessor."""
    folder = home_dir() / "locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"up-{run_id}"
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def launch_run(
    machine: Machine,
    start: LaunchRequest,
    *,
    gpus: Sequence[GpuReading],
    plan: bytes | None = None,
    limits: Limits | None = None,
    created: Callable[[Run], None] = lambda _run: None,
    say: Callable[[str], None] = lambda _text: None,
) -> Run:
    """Create the run and start its supervisor, which starts the server.

    Args:
        created: called with the run before any process of it is started: what a Ctrl-C from then on must end.
        say: takes lines for a person.

    Raises:
        RefusedError: a run of that name is still there.
        DeadError: the supervisor could not start it.
    """
    record = RunRecord(
        name=start.name,
        server=start.server,
        model=start.model,
        version=start.version,
        command=[*start.launch.argv, *_secret_flags(start)],
        env=dict(start.launch.env),
        host=start.host,
        port=start.port,
        run_id=start.run_id,
        created_at=time.time(),
        state_since=time.time(),
        started_by=start.started_by or this_operator(),
        asked=dict(start.asked),
        added=[f"{added.text}: {added.why}" for added in start.launch.added],
        baseline=baseline(machine, gpus),
    )
    run = create_run(record, replace=lambda old: _is_over(machine, old))
    created(run)
    if plan is not None:
        write_private(run.plan_path, plan)
    if start.launch.secret_config:
        _write_secrets(_secrets_path(start.name), start.launch.secret_config)
    removed = prune_runs(start.name, may_remove=lambda folder: _has_ended(machine, Run(folder)))
    if removed:
        say(
            f"removed {removed} earlier run{'s' if removed > 1 else ''}: the last {KEPT_PER_NAME} of a name "
            f"and {KEPT_IN_ALL} in all are kept"
        )
    _supervise(run, limits or Limits(), start.launch)
    return run


def _secrets_path(name: str) -> Path:
    return runs_dir() / name / "secrets.yaml"


def _secret_flags(start: LaunchRequest) -> list[str]:
    return ["--config", str(_secrets_path(start.name))] if start.launch.secret_config else []


def _write_secrets(path: Path, settings: Mapping[str, str]) -> None:
    """A YAML file (JSON is YAML) that only this user can read; the supervisor removes it with the end of the run."""
    write_private(path, json.dumps(dict(settings)).encode())


def _has_ended(machine: Machine, run: Run) -> bool:
    try:
        record = run.read()
    except UsageError:  # unreadable: it is left for a person to look at
        return False
    return _is_over(machine, record)


def _is_over(machine: Machine, record: RunRecord) -> bool:
    """Nothing of the run is left. A start that was cut off before its supervisor counts after a minute."""
    cut_off = record.supervisor is None and time.time() - record.created_at > _LAUNCH_S
    return (record.ended or cut_off) and not owned_processes(machine, record)


def _supervise(run: Run, limits: Limits, launch: Launch) -> None:
    command = [*supervisor_command(run), str(run.folder), f"hang={limits.hang_s}", f"stall={limits.stall_s}"]
    descriptor = os.open(run.folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(descriptor, "ab") as log:
        # secrets travel in the environment: unlike a command line, only the same user can read it
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **launch.secret_env},
        )  # fmt: skip
    try:
        _wait_until_launched(run, child)
    except KeyboardInterrupt:
        # until the server's process is on record, ending the supervisor could leave a server that nobody finds
        _wait_until_launched(run, child)
        raise


def supervisor_command(run: Run) -> list[str]:
    """The command line of the supervisor.

    A helper that was sent to this host is copied to the run's folder; the copy stays as long as the supervisor runs.
    """
    loader = getattr(sys.modules["forebay"].__spec__, "loader", None)
    if not isinstance(loader, zipimporter):
        return [sys.executable, "-m", "forebay.operation.start.supervisor"]
    copy = run.folder / SUPERVISOR_BUNDLE
    write_private(copy, Path(loader.archive).read_bytes())
    return [sys.executable, "-I", str(copy), "supervisor"]


def _wait_until_launched(run: Run, child: subprocess.Popen[bytes]) -> None:
    """Wait until the server's process is on record.

    Raises:
        DeadError: the supervisor ended, or took too long.
    """
    deadline = time.monotonic() + _LAUNCH_S
    while time.monotonic() < deadline:
        if run.read().api_server is not None:
            return
        code = child.poll()
        if code is not None:
            said = (run.folder / "supervisor.log").read_text(errors="replace").strip().splitlines()
            why = said[-1] if said else f"exit code {code}"
            _mark_dead(run, why)
            raise DeadError(f"the run {run.name!r} did not start: {why}")
        time.sleep(0.02)
    child.kill()
    child.wait()
    why = f"its supervisor did not start within {_LAUNCH_S:.0f} s"
    _mark_dead(run, why)
    raise DeadError(f"the run {run.name!r} did not start: {why}", fix=f"see {run.folder}/supervisor.log")


def _mark_dead(run: Run, why: str) -> None:
    """A run that was never launched must not keep its name."""

    def change(record: RunRecord) -> None:
        if not record.ended:
            record.state, record.state_since, record.evidence, record.ended_at = "dead", time.time(), [why], time.time()

    run.update(change)
