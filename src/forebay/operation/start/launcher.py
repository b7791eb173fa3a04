"""Write the record of a run and start its supervisor, which outlives this process and starts the server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forebay.errors import DeadError, UsageError
from forebay.machine.interface import GpuReading, Machine
from forebay.operation.start.preflight import baseline
from forebay.operation.watch.health_state import Limits
from forebay.runs.earlier_runs import KEPT_IN_ALL, KEPT_PER_NAME, prune_runs
from forebay.runs.owned_processes import owned_processes
from forebay.runs.run_record import Run, RunRecord, create_run, this_operator
from forebay.servers.base import Launch

__all__ = ["LaunchRequest", "launch_run"]


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
        command=list(start.launch.argv),
        env=dict(start.launch.env),
        host=start.host,
        port=start.port,
        run_id=uuid.uuid4().hex,
        created_at=time.time(),
        state_since=time.time(),
        started_by=start.started_by or this_operator(),
        asked=dict(start.asked),
        added=[f"{added.text}: {added.why}" for added in start.launch.added],
        baseline=baseline(machine, gpus),
    )
    run = create_run(record, replace=lambda old: old.ended and not owned_processes(machine, old))
    created(run)
    if plan is not None:
        run.plan_path.write_bytes(plan)
    removed = prune_runs(start.name, may_remove=lambda folder: _has_ended(machine, Run(folder)))
    if removed:
        say(
            f"removed {removed} earlier run{'s' if removed > 1 else ''}: the last {KEPT_PER_NAME} of a name "
            f"and {KEPT_IN_ALL} in all are kept"
        )
    _supervise(run, limits or Limits())
    return run


def _has_ended(machine: Machine, run: Run) -> bool:
    try:
        record = run.read()
    except UsageError:  # unreadable: it is left for a person to look at
        return False
    return record.ended and not owned_processes(machine, record)


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
        # until the server's process is on record, ending the supervisor could leave a server that nobody finds
        _wait_until_launched(run, child)
        raise


def _wait_until_launched(run: Run, child: subprocess.Popen[bytes]) -> None:
    """Wait until the server's process is on record.

    Raises:
        DeadError: the supervisor ended, or took too long.
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if run.read().api_server is not None:
            return
        code = child.poll()
        if code is not None:
            said = (run.folder / "supervisor.log").read_text(errors="replace").strip().splitlines()
            raise DeadError(f"the run {run.name!r} did not start: {said[-1] if said else f'exit code {code}'}")
        time.sleep(0.02)
    raise DeadError(f"the supervisor of {run.name!r} did not start within 10 s", fix=f"see {run.folder}/supervisor.log")
