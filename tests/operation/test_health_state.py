"""The health state machine on constructed observations and a virtual clock, one rule per test."""

from __future__ import annotations

import pytest

from forebay.operation.watch.health_state import HealthState, HealthStateMachine, Limits
from forebay.operation.watch.observation import (
    Activity,
    LostProcess,
    Observation,
    Owner,
    OwnerKind,
    TokenState,
    WatchedProcess,
)
from forebay.servers.base import Condition, HealthReading, Role

API_SERVER = WatchedProcess(10, Role.API_SERVER, "S", "python -m server")
ENGINE = WatchedProcess(11, Role.ENGINE, "S", "engine")
OURS = Owner(OwnerKind.OWN, 10, "python -m server")
OTHER = Owner(OwnerKind.OTHER, 99, "python -m http.server")
UP = HealthReading(Condition.UP, "/health answered 200")
STARTING = HealthReading(Condition.STARTING, "/health answered 503")
TOKEN = TokenState(None, 0.0, None, "1 token")


def seen(at: float, **fields: object) -> Observation:
    base: dict[str, object] = {"pid_known": True, "processes": (API_SERVER, ENGINE)}
    return Observation(at=at, **{**base, **fields})  # type: ignore[arg-type]


def ready(at: float, **fields: object) -> Observation:
    return seen(at, **{"owner": OURS, "health": UP, "token": TOKEN, **fields})


def run(machine: HealthStateMachine, *observations: Observation) -> HealthState:
    state = HealthState.UNKNOWN
    for observation in observations:
        state = machine.update(observation).state
    return state


def test_nothing_listens_and_no_pid_is_unknown_never_dead() -> None:
    machine = HealthStateMachine(8000, own=False)
    verdict = machine.update(Observation(at=0.0, pid_known=False))
    assert verdict.state is HealthState.UNKNOWN
    assert verdict.evidence == ("nothing listens on port 8000, and no pid is known",)
    assert machine.update(Observation(at=9999.0, pid_known=False)).state is HealthState.UNKNOWN


def test_another_machine_that_refuses_is_unknown_too() -> None:
    refused = HealthReading(Condition.REFUSED, "/health: refused")
    hidden = Observation(at=0.0, pid_known=False, owner=Owner(OwnerKind.HIDDEN), health=refused)
    assert HealthStateMachine(8000, own=False).update(hidden).state is HealthState.UNKNOWN
    answering = Observation(at=0.0, pid_known=False, owner=Owner(OwnerKind.HIDDEN), health=UP, token=TOKEN)
    assert HealthStateMachine(8000, own=False).update(answering).state is HealthState.READY


def test_ready_needs_all_four() -> None:
    assert run(HealthStateMachine(1, own=True), ready(0.0)) is HealthState.READY
    assert run(HealthStateMachine(1, own=True), ready(0.0, owner=Owner(OwnerKind.NONE))) is not HealthState.READY
    assert run(HealthStateMachine(1, own=True), ready(0.0, health=STARTING)) is not HealthState.READY
    assert run(HealthStateMachine(1, own=True), ready(0.0, token=TokenState())) is not HealthState.READY
    assert run(HealthStateMachine(1, own=True), ready(0.0, processes=())) is not HealthState.READY


def test_another_process_on_the_port_is_never_ours_and_is_the_end_of_a_run() -> None:
    machine = HealthStateMachine(1, own=True)
    assert machine.update(ready(0.0, owner=OTHER)).state is not HealthState.READY
    verdict = machine.update(ready(1.5, owner=OTHER))
    assert verdict.state is HealthState.DEAD
    assert "pid 99" in verdict.evidence[0]


def test_a_ready_line_with_a_lost_port_is_dead_and_one_with_a_real_token_is_ready() -> None:
    line = "[Errno 98] address already in use"
    assert run(HealthStateMachine(1, own=True), seen(0.0, error_line=line, health=STARTING)) is HealthState.DEAD
    assert run(HealthStateMachine(1, own=True), ready(0.0, error_line=line)) is HealthState.READY


@pytest.mark.parametrize("role", [Role.API_SERVER, Role.ENGINE, Role.WORKER])
def test_a_lost_process_is_dead_at_once(role: Role) -> None:
    machine = HealthStateMachine(1, own=True)
    machine.update(ready(0.0))
    verdict = machine.update(ready(0.1, lost=(LostProcess(11, role, "engine", -9),)))
    assert verdict.state is HealthState.DEAD
    assert "killed by signal 9" in verdict.evidence[0]


@pytest.mark.parametrize("letter", ["T", "t"])
def test_a_stopped_process_is_hung_at_once_and_ready_again_when_continued(letter: str) -> None:
    machine = HealthStateMachine(1, own=True)
    machine.update(ready(0.0))
    stopped = WatchedProcess(11, Role.ENGINE, letter, "engine")
    assert machine.update(ready(0.2, processes=(API_SERVER, stopped))).state is HealthState.HUNG
    assert machine.update(ready(0.4)).state is HealthState.READY


def test_a_helper_that_is_stopped_hangs_nothing() -> None:
    helper = WatchedProcess(12, Role.HELPER, "T", "a debugger's child")
    assert run(HealthStateMachine(1, own=True), ready(0.0, processes=(API_SERVER, ENGINE, helper))) is HealthState.READY


def waiting(at: float, cpu: float, tokens: float | None = 0.0) -> Observation:
    token = TokenState(0.0, 0.0, None, "")
    activity = Activity(cpu_s=cpu, engine_cpu_s=cpu, tokens=tokens)
    return ready(at, token=token, activity=activity)


def test_no_token_no_counter_and_no_cpu_for_five_seconds_is_hung() -> None:
    machine = HealthStateMachine(1, own=True)
    states = [machine.update(waiting(float(at), cpu=3.0)).state for at in range(8)]
    assert states[4] is HealthState.READY
    assert states[7] is HealthState.HUNG


def test_cpu_without_tokens_is_busy_and_hung_after_the_limit() -> None:
    machine = HealthStateMachine(1, own=True, limits=Limits(hang_s=30.0))
    machine.update(ready(-1.0))
    states = {at: machine.update(waiting(float(at), cpu=float(at))).state for at in range(40)}
    assert states[10] is HealthState.BUSY
    assert states[29] is HealthState.BUSY
    assert states[31] is HealthState.HUNG


def test_tokens_of_others_that_move_keep_it_busy_for_ever() -> None:
    machine = HealthStateMachine(1, own=True, limits=Limits(hang_s=30.0))
    machine.update(ready(-1.0))
    for at in range(200):
        state = machine.update(waiting(float(at), cpu=0.0, tokens=float(at))).state
    assert state is HealthState.BUSY


def test_silence_while_starting_is_stalled_only_when_nothing_at_all_moves() -> None:
    moving = {
        "log": lambda at: Activity(log_bytes=int(at)),
        "memory": lambda at: Activity(rss_bytes=int(at) << 20),
        "reading": lambda at: Activity(read_bytes=int(at) << 16),
        "cpu": lambda at: Activity(cpu_s=at * 0.5),
    }
    for name, activity in moving.items():
        machine = HealthStateMachine(1, own=True, limits=Limits(stall_s=60.0))
        states = {machine.update(seen(float(at), activity=activity(float(at)))).state for at in range(300)}
        assert states == {HealthState.STARTING}, name
    machine = HealthStateMachine(1, own=True, limits=Limits(stall_s=60.0))
    states = [machine.update(seen(float(at))).state for at in range(80)]
    assert states[55] is HealthState.STARTING
    assert states[-1] is HealthState.STALLED


def test_cpu_alone_is_said_and_not_called_progress() -> None:
    machine = HealthStateMachine(1, own=True)
    for at in range(20):
        verdict = machine.update(seen(float(at), activity=Activity(cpu_s=float(at))))
    assert verdict.state is HealthState.STARTING
    assert verdict.note == "no visible progress for 19 s; CPU at 100% of a core"


def test_a_percentage_is_progress() -> None:
    machine = HealthStateMachine(1, own=True, limits=Limits(stall_s=10.0))
    states = {machine.update(seen(float(at), stage="loading", percent=float(at))).state for at in range(60)}
    assert states == {HealthState.STARTING}


def test_a_pause_is_neither_busy_nor_hung() -> None:
    machine = HealthStateMachine(1, own=True)
    machine.update(ready(0.0))
    verdict = machine.update(ready(1.0, paused="/ready answered 503 and /ping 200"))
    assert verdict.state is HealthState.PAUSED


def test_since_is_kept_while_the_state_is() -> None:
    machine = HealthStateMachine(1, own=True)
    machine.update(ready(3.0))
    assert machine.update(ready(9.0)).since == 3.0


def test_errors_after_ready_are_no_death() -> None:
    machine = HealthStateMachine(1, own=True)
    machine.update(ready(0.0))
    assert machine.update(ready(1.0, error_line="ERROR one bad request")).state is HealthState.READY
