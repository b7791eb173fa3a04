"""The record of a run: a folder ``$FOREBAY_HOME/runs/NAME`` with run.json, plan.json, server.log and events.jsonl.

``run.json`` outlives the supervisor, the terminal and a reboot. It names the run's processes (pid, start time and boot
id together, so that no other process is ever signalled), what was asked for and what happened. It is replaced
atomically under a lock, because the supervisor and the command that watches it both write.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import RefusedError, UsageError
from forebay.json_records import decode_record, encode_record
from forebay.machine.processes import ProcessId
from forebay.paths import earlier_runs_dir, runs_dir
from forebay.runs.earlier_runs import archive_run

__all__ = [
    "SCHEMA",
    "Baseline",
    "Run",
    "RunRecord",
    "StageTime",
    "all_runs",
    "create_run",
    "find_run",
    "open_run",
    "run_with_id",
    "this_operator",
    "write_private",
]

SCHEMA = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a start. ``cpu_s`` and bytes are summed over the run's processes.

    ``slower_than_before``: the median seconds of the same stage in earlier starts, set when this one took much longer.
    """

    name: str
    seconds: float
    read_bytes: int = 0
    grown_bytes: int = 0
    cpu_s: float = 0.0
    slower_than_before: float | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """The machine before the launch; ``down`` compares with it."""

    host_available_bytes: int
    gpu_used_bytes: dict[str, int]
    shm_names: list[str]


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """run.json. ``_bytes`` are bytes, ``_s`` seconds, ``_at`` wall clock seconds since the epoch.

    ``api_server`` is the process that was launched, ``members`` every process seen of the run, ``started_by`` the user
    and host that typed the command.
    """

    schema: int = SCHEMA
    name: str
    server: str
    model: str
    version: str
    command: list[str]
    env: dict[str, str]
    host: str
    port: int
    run_id: str
    created_at: float
    started_by: str = ""
    asked: dict[str, str] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    state: str = "launching"
    state_since: float = 0.0
    stage: str = ""
    percent: float | None = None
    evidence: list[str] = field(default_factory=list)
    api_server: ProcessId | None = None
    supervisor: ProcessId | None = None
    members: list[ProcessId] = field(default_factory=list)
    member_names: dict[str, str] = field(default_factory=dict)
    shm_names: list[str] = field(default_factory=list)
    ready_after_s: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    cause: str | None = None
    stop_requested_at: float | None = None
    stages: list[StageTime] = field(default_factory=list)
    baseline: Baseline | None = None
    verify: list[dict[str, str | None]] = field(default_factory=list)
    tokens_per_s: float | None = None

    @property
    def client_host(self) -> str:
        """The address that a client on the same machine connects to: a wildcard is reached over loopback."""
        return _WILDCARDS.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The server's URL for a client on the same machine, without ``/v1``."""
        host = self.client_host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def ended(self) -> bool:
        """The run is over (its processes may still need a ``down``)."""
        return self.state in ("dead", "stopped")


@dataclass(frozen=True, slots=True)
class Run:
    """One run's folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log_path(self) -> Path:
        return self.folder / "server.log"

    @property
    def events_path(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def plan_path(self) -> Path:
        return self.folder / "plan.json"

    def read(self) -> RunRecord:
        """The record now.

        Raises:
            UsageError: run.json is missing, cannot be read, or is of a newer schema.
        """
        path = self.folder / "run.json"
        try:
            fields = json.loads(path.read_bytes())
            return decode_record(RunRecord, _of_this_schema(fields))
        except FileNotFoundError:
            raise UsageError(f"{self.folder} has no run.json, so it is not a run", fix="see `forebay status`") from None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} cannot be read: {error}", fix=f"remove {self.folder} if the run is no longer needed"
            ) from error

    def write(self, record: RunRecord) -> None:
        """Replace run.json in one step; only its owner may read it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.folder / "run.json.tmp"
        write_private(temporary, encode_record(record))
        temporary.rename(self.folder / "run.json")

    def update(self, change: Callable[[RunRecord], None]) -> RunRecord:
        """Read, ``change`` and write under the run's lock; returns the record as written."""
        with _locked(self.folder / ".lock"):
            record = self.read()
            change(record)
            self.write(record)
            return record

    def event(self, kind: str, **fields: object) -> dict[str, object]:
        """Append one event and return it. A line is written whole, so readers never see half of one."""
        line: dict[str, object] = {"schema": SCHEMA, "at": round(time.time(), 3), "event": kind, **fields}
        descriptor = os.open(self.events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab") as sink:
            sink.write(json.dumps(line).encode() + b"\n")
        return line

    def events_from(self, offset: int) -> tuple[list[Mapping[str, Any]], int]:
        """The events written after byte ``offset``, and the offset to go on from."""
        try:
            with self.events_path.open("rb") as source:
                source.seek(offset)
                data = source.read()
        except FileNotFoundError:
            return [], offset
        whole = data[: data.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], offset + len(whole)


def find_run(name: str) -> Run | None:
    """The run called ``name``, current or kept from earlier; None where there is none."""
    if not _NAME.fullmatch(name):
        return None
    for root in (runs_dir(), earlier_runs_dir()):
        if (root / name / "run.json").is_file():
            return Run(root / name)
    return None


def open_run(name: str) -> Run:
    """The run called ``name``, current or kept from earlier.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    run = find_run(name)
    if run is not None:
        return run
    known = ", ".join(sorted(other.name for other in all_runs())) or "none"
    raise UsageError(f"no run is called {name!r} (known: {known})", fix="see `forebay status`")


def run_with_id(run_id: str) -> Run | None:
    """The latest run of a name that has this id; None where there is none."""
    for run in all_runs():
        with contextlib.suppress(UsageError):
            if run.read().run_id == run_id:
                return run
    return None


def all_runs(*, earlier: bool = False) -> list[Run]:
    """The latest run of every name, oldest first; ``earlier`` adds those kept from before, in front."""
    roots = [earlier_runs_dir(), runs_dir()] if earlier else [runs_dir()]
    found = []
    for root in roots:
        folders = [path.parent for path in root.glob("*/run.json")] if root.is_dir() else []
        found += [Run(folder) for folder in sorted(folders, key=_changed_at)]
    return found


def create_run(record: RunRecord, *, replace: Callable[[RunRecord], bool]) -> Run:
    """Make the folder of ``record.name`` and write the record, as one step: of two callers at once one wins.

    Args:
        replace: whether an earlier run of that name may be moved aside (it has ended and nothing of it is left).

    Raises:
        UsageError: the name cannot be a folder's.
        RefusedError: a run of that name is still there; says who started it and when.
    """
    if not _NAME.fullmatch(record.name):
        raise UsageError(f"--name {record.name!r}: use letters, digits, dot, dash and underscore, 64 at most")
    run = Run(runs_dir() / record.name)
    runs_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(runs_dir() / ".lock"):
        if (run.folder / "run.json").is_file():
            old = run.read()
            if not replace(old):
                raise RefusedError(
                    f"a run called {record.name!r} is still there: {_who_and_when(old)}",
                    fix=f"end it with `forebay down {record.name}`, or give another --name",
                )
            archive_run(run.folder)
        shutil.rmtree(run.folder, ignore_errors=True)  # what a start that was cut off before its record left
        run.write(record)
    return run


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as sink:
        sink.write(data)


def this_operator() -> str:
    """``user@host`` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{os.uname().nodename}"


def _who_and_when(record: RunRecord) -> str:
    minutes = max(0.0, time.time() - record.created_at) / 60
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created_at))
    return f"started by {record.started_by or 'somebody'} at {when} ({minutes:.0f} min ago), {record.state}"


def _of_this_schema(fields: Any) -> Any:
    """Schema 1 called the API server ``front``."""
    if not isinstance(fields, dict) or not isinstance(fields.get("schema"), int):
        raise ValueError("it has no schema number")
    if fields["schema"] > SCHEMA:
        raise ValueError(f"it has schema {fields['schema']}, this forebay reads up to {SCHEMA}: update forebay")
    if fields["schema"] == 1:
        names = fields.get("member_names")
        if isinstance(names, dict):
            fields["member_names"] = {pid: re.sub(r"^front\b", "api_server", str(name)) for pid, name in names.items()}
        fields["api_server"] = fields.pop("front", None)
        fields["schema"] = SCHEMA
    return fields


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_ctime
    except OSError:  # removed since it was listed
        return 0.0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
