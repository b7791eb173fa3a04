"""From a command to a supervised run: the record is written, then a supervisor is started that outlives this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forebay.errors import DeadError
from forebay.machine.interface import GpuReading, Machine
from forebay.operation.records.owned_processes import owned_processes
from forebay.operation.records.run_record import Run, RunRecord, create_run
from forebay.operation.start.preflight import baseline
from forebay.operation.watch.health_state import Limits
from forebay.servers.base import Launch

__all__ = ["Start", "launch_run"]


@dataclass(frozen=True, slots=True)
class Start:
    """What to launch and how to call it."""

    name: str
    server: str
    model: str
    version: str
    host: str
    port: int
    launch: Launch
    asked: Mapping[str, str]


def launch_run(
    machine: Machine,
    start: Start,
    *,
    gpus: Sequence[GpuReading],
    plan: bytes | None = None,
    limits: Limits | None = None,
    created: Callable[[Run], None] = lambda _run: None,
) -> Run:
    """Create the run and start its supervisor, which starts the server.

    Args:
        created: called with the run before anything of it is started: what a Ctrl-C from then on must end.

    Raises:
        RefusedError: a run of that name is still there.
        DeadError: the supervisor could not start it.
    """
    run = create_run(start.name, replace=lambda old: old.ended and not owned_processes(machine, old))
    run.events_path.unlink(missing_ok=True)
    if plan is not None:
        run.plan_path.write_bytes(plan)
    run.write(
        RunRecord(
            name=start.name,
            server=start.server,
            model=start.model,
            version=start.version,
            command=list(start.launch.argv),
            env=dict(start.launch.env),
            host=start.host,
            port=start.port,
            run_id=uuid.uuid4().hex,
            created_at=time.time(),
            state_since=time.time(),
            asked=dict(start.asked),
            added=[f"{added.text}: {added.why}" for added in start.launch.added],
            baseline=baseline(machine, gpus),
        )
    )
    created(run)
    _supervise(run, limits or Limits())
    return run


def _supervise(run: Run, limits: Limits) -> None:
    command = [
        sys.executable, "-m", "forebay.operation.start.supervisor", str(run.folder),
        f"hang={limits.hang_s}", f"stall={limits.stall_s}",
    ]  # fmt: skip
    with (run.folder / "supervisor.log").open("ab") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=os.environ.copy()
        )
    try:
        _wait_until_launched(run, child)
    except KeyboardInterrupt:
        # a supervisor between its start and the record of its server could be ended, and the server not be found
        _wait_until_launched(run, child)
        raise


def _wait_until_launched(run: Run, child: subprocess.Popen[bytes]) -> None:
    """Until the server's process is on record.

    Raises:
        DeadError: the supervisor ended, or took too long.
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if run.read().front is not None:
            return
        code = child.poll()
        if code is not None:
            said = (run.folder / "supervisor.log").read_text(errors="replace").strip().splitlines()
            raise DeadError(f"the run {run.name!r} did not start: {said[-1] if said else f'exit code {code}'}")
        time.sleep(0.02)
    raise DeadError(f"the supervisor of {run.name!r} did not start within 10 s", fix=f"see {run.folder}/supervisor.log")
