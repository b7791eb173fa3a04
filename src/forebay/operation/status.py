"""The runs on this machine and their state now: the record of each, checked against the processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from forebay.machine.interface import Machine
from forebay.machine.processes import boot_id, is_running
from forebay.runs.owned_processes import owned_processes
from forebay.runs.run_record import Run, RunRecord, all_runs, open_run
from forebay.servers.base import Counters
from forebay.servers.http_client import parse_address, send
from forebay.servers.registry import server_named

__all__ = ["RunStatus", "overview"]

_UP = ("ready", "busy")
_RATE_S = 0.5


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run now. ``note``: what a person should know beyond the state."""

    name: str
    server: str
    model: str
    url: str
    state: str
    stage: str
    age_s: float
    state_s: float
    processes: int
    rss_bytes: int
    tokens_per_s: float | None
    requests: float | None
    note: str
    cause: str | None

    def as_json(self) -> dict[str, object]:
        """The record behind ``--json``."""
        return {"schema": 1, **{name: getattr(self, name) for name in self.__slots__}}


def overview(
    machine: Machine, *, name: str | None = None, earlier: bool = False, rates: bool = True
) -> list[RunStatus]:
    """The runs on ``machine``, oldest first.

    Args:
        name: only this one.
        earlier: also the ended runs that are kept from before.
        rates: read the counters of those that serve twice, half a second apart.

    Raises:
        UsageError: no run is called ``name``.
    """
    runs = all_runs(earlier=earlier) if name is None else [open_run(name)]
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(runs)))) as pool:
        return list(pool.map(lambda run: _status(machine, run, rates), runs))


def _status(machine: Machine, run: Run, rates: bool) -> RunStatus:
    record = run.read()
    processes = owned_processes(machine, record)
    state, note = _state_now(machine, record, len(processes))
    speed, requests = _speed(machine, record) if rates and state in _UP else (None, None)
    now = time.time()
    return RunStatus(
        name=run.name,
        server=f"{record.server} {record.version}",
        model=record.model,
        url=record.url,
        state=state,
        stage=record.stage,
        age_s=round((record.ended_at if record.ended and record.ended_at else now) - record.created_at, 1),
        state_s=round(now - record.state_since, 1),
        processes=len(processes),
        rss_bytes=sum(info.rss_bytes for info in processes),
        tokens_per_s=speed,
        requests=requests,
        note=note,
        cause=record.cause,
    )


def _state_now(machine: Machine, record: RunRecord, processes: int) -> tuple[str, str]:
    """The state on record while the supervisor lives; without it, the state the processes show."""
    if record.ended:
        left = f"{processes} of its processes are still there: forebay down {record.name}" if processes else ""
        return record.state, left
    if record.api_server is None or record.supervisor is None:
        return record.state, "not launched yet"
    if record.api_server.boot_id != boot_id(machine):
        return "dead", "the machine has been rebooted since"
    supervised = is_running(machine, record.supervisor)
    if not is_running(machine, record.api_server):
        left = f", {processes} of its processes are left: forebay down {record.name}" if processes else ""
        return ("dead", f"its API server is gone{left}") if not supervised else (record.state, "its API server is gone")
    return record.state, "" if supervised else "its supervisor is gone: this is the last state it wrote"


def _speed(machine: Machine, record: RunRecord) -> tuple[float | None, float | None]:
    first, began = _counters(machine, record), time.monotonic()
    if first.generated is None:
        return None, first.running
    time.sleep(_RATE_S)
    second = _counters(machine, record)
    if second.generated is None:
        return None, first.running
    rate = (second.generated - first.generated) / (time.monotonic() - began)
    return round(max(0.0, rate), 1), second.running


def _counters(machine: Machine, record: RunRecord) -> Counters:
    answer = send(machine, parse_address(record.url), "GET", "/metrics", timeout_s=3.0)
    return server_named(record.server).counters(answer.text) if answer.ok else Counters()
