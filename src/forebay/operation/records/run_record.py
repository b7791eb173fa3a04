"""The record of a run: a folder ``$FOREBAY_HOME/runs/NAME`` with run.json, plan.json, server.log and events.jsonl.

``run.json`` is what survives the supervisor, the terminal and a reboot: who the processes were (pid, start time and boot id
together, so that no stranger is ever signalled), what was asked, what happened. It is replaced atomically under a lock,
because the supervisor and the command that watches it both write.
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import RefusedError, UsageError
from forebay.machine.processes import ProcessId
from forebay.paths import runs_dir

__all__ = ["SCHEMA", "Baseline", "Run", "RunRecord", "StageTime", "all_runs", "create_run", "open_run"]

SCHEMA = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StageTime(msgspec.Struct, frozen=True):
    """One stage of a start and what moved in it. ``cpu_s`` and bytes are summed over the run's processes."""

    name: str
    seconds: float
    read_bytes: int = 0
    grown_bytes: int = 0
    cpu_s: float = 0.0
    slower_than_before: float | None = None
    """Seconds the same stage took in earlier runs of the same server and model (median), when this one was much slower."""


class Baseline(msgspec.Struct, frozen=True):
    """The machine before the launch, against which ``down`` proves that everything is back."""

    host_available_bytes: int
    gpu_used_bytes: dict[str, int]
    shm_names: list[str]


class RunRecord(msgspec.Struct, kw_only=True, omit_defaults=False):
    """run.json. ``_bytes`` are bytes, ``_s`` seconds, ``at`` wall clock seconds since the epoch."""

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
    asked: dict[str, str] = {}
    added: list[str] = []
    state: str = "launching"
    state_since: float = 0.0
    stage: str = ""
    percent: float | None = None
    evidence: list[str] = []
    front: ProcessId | None = None
    supervisor: ProcessId | None = None
    members: list[ProcessId] = []
    member_names: dict[str, str] = {}
    shm_names: list[str] = []
    ready_after_s: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    cause: str | None = None
    stop_requested_at: float | None = None
    stages: list[StageTime] = []
    baseline: Baseline | None = None
    verify: list[dict[str, str | None]] = []
    tokens_per_s: float | None = None

    @property
    def url(self) -> str:
        """Where the server answers."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
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
            UsageError: run.json is missing or not one of ours.
        """
        try:
            return msgspec.json.decode((self.folder / "run.json").read_bytes(), type=RunRecord)
        except FileNotFoundError:
            raise UsageError(f"{self.folder} has no run.json: it is no run", fix="see `forebay status`") from None
        except msgspec.DecodeError as error:
            raise UsageError(f"{self.folder / 'run.json'} cannot be read: {error}") from error

    def write(self, record: RunRecord) -> None:
        """Replace run.json in one step."""
        temporary = self.folder / "run.json.tmp"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        temporary.rename(self.folder / "run.json")

    def update(self, change: Callable[[RunRecord], None]) -> RunRecord:
        """Read, ``change`` and write under the run's lock; the record as written."""
        with self._locked():
            record = self.read()
            change(record)
            self.write(record)
            return record

    def event(self, kind: str, **fields: object) -> dict[str, object]:
        """Append one event and return it. A line is written whole, so readers never see half of one."""
        line: dict[str, object] = {"schema": SCHEMA, "at": round(time.time(), 3), "event": kind, **fields}
        with self.events_path.open("ab") as sink:
            sink.write(json.dumps(line).encode() + b"\n")
        return line

    def events_from(self, offset: int) -> tuple[list[Mapping[str, object]], int]:
        """The events written after byte ``offset``, and where to go on."""
        try:
            with self.events_path.open("rb") as source:
                source.seek(offset)
                data = source.read()
        except FileNotFoundError:
            return [], offset
        whole = data[: data.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], offset + len(whole)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def open_run(name: str) -> Run:
    """The run called ``name``.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    run = Run(runs_dir() / name)
    if _NAME.fullmatch(name) and (run.folder / "run.json").is_file():
        return run
    known = ", ".join(sorted(other.name for other in all_runs())) or "none"
    raise UsageError(f"no run is called {name!r} (known: {known})", fix="see `forebay status`")


def all_runs() -> list[Run]:
    """Every run on record, oldest first."""
    root = runs_dir()
    folders = [path.parent for path in root.glob("*/run.json")] if root.is_dir() else []
    return [Run(folder) for folder in sorted(folders, key=lambda path: path.stat().st_ctime)]


def create_run(name: str, *, replace: Callable[[RunRecord], bool]) -> Run:
    """A fresh folder for ``name``; an earlier run's folder is moved to ``NAME.old`` when ``replace`` agrees.

    Raises:
        UsageError: the name cannot be a folder's.
        RefusedError: a run of that name is still there.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name {name!r}: use letters, digits, dot, dash and underscore, 64 at most")
    run = Run(runs_dir() / name)
    if (run.folder / "run.json").is_file():
        if not replace(run.read()):
            raise RefusedError(
                f"a run called {name!r} is still there",
                fix=f"end it with `forebay down {name}`, or give another --name",
            )
        _archive(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


def _archive(folder: Path) -> None:
    """Keep the last ended run of a name: its stage times are what the next start is compared with."""
    for number in range(1, 1000):
        target = folder.with_name(f"{folder.name}.{number}")
        if not target.exists():
            folder.rename(target)
            return
    raise RefusedError(f"{folder} has 999 earlier runs", fix=f"remove some of {folder}.*")
