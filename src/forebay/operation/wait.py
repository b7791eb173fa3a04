"""Wait for a server that anyone started, with the watcher that the supervisor of a run uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import ExitCode
from forebay.machine.interface import Machine
from forebay.operation.doctor.run_diagnosis import diagnose_log
from forebay.operation.output import make_event
from forebay.operation.watch.health_state import HealthState, Limits
from forebay.operation.watch.log_follower import LogFollower
from forebay.operation.watch.target import Target, guess_server
from forebay.operation.watch.watcher import PollIntervals, Watcher
from forebay.servers.base import Server

__all__ = ["WaitOptions", "wait_for"]

_SETTLE_S = 0.8  # after a death the log's last lines are still being written
_CODES = {
    HealthState.READY: ExitCode.DONE,
    HealthState.DEAD: ExitCode.DEAD,
    HealthState.HUNG: ExitCode.STALLED,
    HealthState.STALLED: ExitCode.STALLED,
}


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """How long to wait, and what counts as a hang or a stall."""

    timeout_s: float | None = None
    limits: Limits = field(default_factory=Limits)


def wait_for(
    machine: Machine, target: Target, options: WaitOptions, show: Callable[[Mapping[str, Any]], None]
) -> ExitCode:
    """Watch ``target`` until it is ready, dead, hung or stalled, or time is up. Ctrl-C leaves it as it is.

    Args:
        show: takes each event as it happens; the last one is the answer.
    """
    began = time.monotonic()
    server = guess_server(machine, target)
    watcher = _watch(machine, target, server, options)
    while True:
        for event in watcher.step():
            if event.kind != HealthState.DEAD:
                show(make_event(event.kind, **event.fields))
        state = watcher.verdict.state
        if state is HealthState.DEAD:
            return _dead(machine, target, server, watcher, show)
        if state in _CODES:
            return _CODES[state]
        if options.timeout_s is not None and time.monotonic() - began > options.timeout_s:
            stage, percent = watcher.stage
            evidence = [*watcher.verdict.evidence, f"last stage: {stage or 'none seen'}"]
            show(make_event("time_is_up", state=state.value, stage=stage, percent=percent, evidence=evidence))
            return ExitCode.TIME_IS_UP
        if server.name == "unknown" and watcher.sampler.api_server is not None:
            better = guess_server(machine, target)
            if better.name != "unknown":
                server, watcher = better, _watch(machine, target, better, options)
        watcher.wake.wait(watcher.turn_s())
        watcher.wake.clear()


def _watch(machine: Machine, target: Target, server: Server, options: WaitOptions) -> Watcher:
    log = LogFollower(machine, target.log, server.name) if target.log is not None else None
    return Watcher(
        machine, server, target.address, api_server=target.api_server, own=target.api_server is not None,
        session=target.run is not None, log=log, limits=options.limits, intervals=PollIntervals(),
    )  # fmt: skip


def _dead(
    machine: Machine, target: Target, server: Server, watcher: Watcher, show: Callable[[Mapping[str, Any]], None]
) -> ExitCode:
    """Report a death once its evidence is complete: the API server ends after its worker,
    the log gets its last lines.
    """
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        watcher.step()
        time.sleep(0.1)
    evidence = list(watcher.verdict.evidence)
    diagnosis = diagnose_log(target.log, server.name, watcher.death_observation())
    show(make_event("dead", evidence=evidence, stage=watcher.stage[0], **diagnosis.fields()))
    return ExitCode.DEAD
