"""What every server must survive being watched through: suites that the three fault files run on the real servers.

A suite is a class whose ``case`` a fixture of the file gives. Tests of ``Serving`` share one server and run in the
order in which they stand; the last one kills it. A verdict must come within 2 s of its evidence: both are read from
clocks of the run itself, and what this machine makes everybody wait is measured beside it and allowed for (``Beat``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from operator_driving import (
    Beat,
    Driver,
    Result,
    assert_nothing_left,
    by_hand,
    cpu_s,
    gone_at,
    pid_of,
    process_state,
    resident_bytes,
    stopped_at,
    stranger,
    until,
)
from operator_peers import truncated_copy
from ports import free_port

from forebay.machine.local import LocalMachine
from forebay.servers.http_client import parse_address, send
from forebay.servers.install import find_installation
from forebay.servers.registry import server_named

LATEST_S = 20.0
"""When a test gives up. The rule, 2 s from the evidence, is ``Beat.assert_soon``'s."""


@dataclass(frozen=True)
class Case:
    """One server and how to start it small.

    Attributes:
        flags: what a good start needs.
        engine: words of the title of the process that holds the model.
        warm_up: words of the log line that says loading is over and the first run begins.
        bad_flag: a flag of this server that does not exist.
        too_long, too_big: flags of a context and of a pool that cannot work, with the cause each must have.
    """

    server: str
    model: Path
    flags: tuple[str, ...]
    engine: str
    warm_up: str
    bad_flag: str
    too_long: tuple[tuple[str, ...], str]
    too_big: tuple[tuple[str, ...], str]
    pause: tuple[str, str] | None = None
    """Paths that pause and resume generation, where the server has them."""
    ready_s: float = 400.0

    def up(self, driver: Driver, name: str, *extra: str, port: int | None = None, flags: Sequence[str] = ()) -> Result:
        """``forebay up`` to its end."""
        return driver(*self.words(name, *extra, port=port, flags=flags), timeout_s=self.ready_s)

    def words(self, name: str, *extra: str, port: int | None = None, flags: Sequence[str] = ()) -> list[str]:
        words = ["up", str(self.model), "--server", self.server, "--name", name, "--port", str(port or free_port())]
        return [*words, "--json", *extra, "--", *self.flags, *flags]

    def hand(self, model: Path, port: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """The same start as somebody would type it."""
        server = server_named(self.server)
        installation = find_installation(self.server, server.distributions)
        head = {
            "embedded": ("forebay", "serve", str(model)),
            "sglang": ("--model-path", str(model)),
            "vllm": ("--model", str(model)),
        }
        argv = (*head[self.server], "--host", "127.0.0.1", "--port", str(port), *self.flags)
        launch = server.finalize_command(argv, {}, installation, gpus=0)
        return launch.argv, dict(launch.env)


class Serving:
    """One good start, and what happens to it while it serves."""

    name = "serving"

    def test_ready_names_its_own_process_and_a_token(self, case: Case, served: Driver) -> None:
        record = served.record(self.name)
        ready = next(event for event in served.events(self.name) if event["event"] == "ready")
        assert record["state"] == "ready"
        assert ready["owner"]["pid"] == record["api_server"]["pid"]
        assert "1 token" in ready["evidence"][0]
        assert record["ready_after_s"] > 0
        assert {"loading"} <= {stage["name"] for stage in record["stages"]}

    def test_the_supervisor_is_small(self, case: Case, served: Driver) -> None:
        pid = served.record(self.name)["supervisor"]["pid"]
        before, began = cpu_s(pid), time.monotonic()
        time.sleep(5.0)
        share = (cpu_s(pid) - before) / (time.monotonic() - began)
        print(f"{case.server}, supervisor: {share:.2%} of a core, {resident_bytes(pid) / 1e6:.0f} MB")
        assert share < 0.02
        assert resident_bytes(pid) < 80e6

    def test_another_run_may_not_have_its_port(self, case: Case, served: Driver) -> None:
        again = case.up(served, "second", port=served.record(self.name)["port"])
        assert again.code == 3
        assert "port_in_use" in again.err
        assert self.name in again.err

    def test_a_second_of_its_kind_started_by_hand_never_has_its_port(
        self, case: Case, served: Driver, tmp_path: Path
    ) -> None:
        port = served.record(self.name)["port"]
        dies_by_hand(case, served, case.model, tmp_path, "port_in_use", port=port)
        assert served("wait", self.name, "--json").code == 0, "the first one serves on"

    def test_wait_by_address_names_the_owner(self, case: Case, served: Driver) -> None:
        record = served.record(self.name)
        waited = served("wait", record["url"] if "url" in record else f"http://127.0.0.1:{record['port']}", "--json")
        assert waited.code == 0
        assert waited.event("ready")["owner"]["pid"] == record["api_server"]["pid"]

    def test_a_stopped_engine_is_hung_at_once_and_well_again_when_continued(self, case: Case, served: Driver) -> None:
        engine = pid_of(served.record(self.name), case.engine)
        began = time.time()
        os.kill(engine, signal.SIGSTOP)
        try:
            with Beat() as beat:
                seen = stopped_at(engine)
                hung = served.wait_event(self.name, "hung", after=began, timeout_s=LATEST_S)
            beat.assert_soon(f"{case.server}, engine stopped", hung["at"], seen)
            assert any("state T" in line and str(engine) in line for line in hung["evidence"])
            assert served("wait", self.name, "--json").code == 6
            assert served("status", self.name, "--json").out.count('"hung"') == 1
        finally:
            os.kill(engine, signal.SIGCONT)
        served.wait_event(self.name, "ready", after=time.time(), timeout_s=60.0)

    def test_a_pause_is_told_from_a_hang(self, case: Case, served: Driver) -> None:
        if case.pause is None:
            pytest.skip(f"{case.server} cannot be paused over HTTP as it was started")
        pause, resume = case.pause
        address = parse_address(f"http://127.0.0.1:{served.record(self.name)['port']}")
        send(LocalMachine(), address, "POST", pause, {}, timeout_s=10)
        try:
            waited = served("wait", self.name, "--timeout", "4", "--json")
            assert waited.code == 5
            assert "paused on request" in waited.event("paused")["evidence"][0]
        finally:
            send(LocalMachine(), address, "POST", resume, {}, timeout_s=10)
        assert served("wait", self.name, "--json").code == 0

    def test_a_killed_engine_is_dead_before_its_api_server_is(self, case: Case, served: Driver) -> None:
        record = served.record(self.name)
        engine, pids = pid_of(record, case.engine), [int(pid) for pid in record["member_names"]]
        began = time.time()
        os.kill(engine, signal.SIGKILL)
        with Beat() as beat:
            seen = gone_at(engine)
            dead = served.wait_event(self.name, "dead", after=began, timeout_s=LATEST_S)
        beat.assert_soon(f"{case.server}, engine killed while serving", dead["at"], seen)
        assert dead["cause"] == "worker_killed", dead
        assert any(str(engine) in line for line in dead["evidence"]), dead
        assert_nothing_left(served, self.name, pids)


class Ending:
    """Starts that end from outside: each needs a server of its own."""

    def test_a_killed_api_server_is_dead_and_down_ends_its_orphans(self, case: Case, driver: Driver) -> None:
        up = case.up(driver, "orphans", "--detach", "--no-verify")
        assert up.code == 0, up.told
        record = driver.record("orphans")
        api_server, pids = record["api_server"]["pid"], [int(pid) for pid in record["member_names"]]
        began = time.time()
        os.kill(api_server, signal.SIGKILL)
        with Beat() as beat:
            seen = gone_at(api_server)
            dead = driver.wait_event("orphans", "dead", after=began, timeout_s=LATEST_S)
        beat.assert_soon(f"{case.server}, API server killed", dead["at"], seen)
        assert dead["cause"] == "front_killed", dead
        assert dead["exit_code"] == -9
        assert_nothing_left(driver, "orphans", pids)

    def test_sigterm_from_outside_is_told_from_a_failure(self, case: Case, driver: Driver) -> None:
        up = driver.start(*case.words("asked", "--no-verify"))
        try:
            driver.wait_event("asked", "ready", timeout_s=case.ready_s)
            pids = [int(pid) for pid in driver.record("asked")["member_names"]]
            os.kill(driver.record("asked")["api_server"]["pid"], signal.SIGTERM)
            out, err = up.communicate(timeout=90)
        finally:
            up.kill()
        assert up.returncode == 4, err[-2000:]
        dead = Result(4, out, err, 0.0).event("dead")
        assert dead["cause"] == "stopped_on_request", dead
        assert_nothing_left(driver, "asked", pids)

    def test_an_engine_killed_while_loading_is_dead_at_once(self, case: Case, driver: Driver) -> None:
        self._killed(case, driver, "loading", until_line="")

    def test_an_engine_killed_in_warm_up_is_dead_at_once(self, case: Case, driver: Driver) -> None:
        self._killed(case, driver, "warming", until_line=case.warm_up)

    def _killed(self, case: Case, driver: Driver, name: str, *, until_line: str) -> None:
        """SIGKILL for the engine as soon as it is there and the log has ``until_line``; never ready, dead at once."""
        up = driver.start(*case.words(name, "--no-verify"))
        try:
            engine = until(lambda: _titled(driver, name, case.engine), case.ready_s)
            assert engine, driver.log_tail(name)
            assert _logged(driver, name, until_line, case.ready_s), driver.log_tail(name)
            began = time.time()
            os.kill(engine, signal.SIGKILL)
            with Beat() as beat:
                seen = gone_at(engine)
                out, err = up.communicate(timeout=90)
        finally:
            up.kill()
        assert up.returncode == 4, err[-2000:]
        dead = driver.wait_event(name, "dead", after=began, timeout_s=1.0)
        assert dead["cause"] == "worker_killed", dead
        assert not [event for event in Result(4, out, err, 0.0).events if event["event"] == "ready"]
        beat.assert_soon(f"{case.server}, engine killed while {name}", dead["at"], seen)
        assert_nothing_left(driver, name, [engine])


class FailedStarts:
    """Starts that cannot work: the right cause, no false ready, nothing left."""

    def test_bad_flag(self, case: Case, driver: Driver) -> None:
        with Beat() as beat:
            up = case.up(driver, "bad", flags=(case.bad_flag,))
        assert up.code == 4, up.told
        assert up.event("dead")["cause"] == "bad_flag", up.event("dead")
        assert not [event for event in up.events if event["event"] == "ready"]
        self._assert_soon(case, driver, "bad", up, beat)
        assert_nothing_left(driver, "bad", [])

    def test_context_too_long(self, case: Case, driver: Driver) -> None:
        flags, cause = case.too_long
        self._refused_or_dead(case, driver, flags, cause)

    def test_pool_too_big_for_the_machine(self, case: Case, driver: Driver) -> None:
        flags, cause = case.too_big
        refused = case.up(driver, "planned", flags=flags)
        assert refused.code == 3, refused.told
        assert not (driver.home / "runs" / "planned").exists()
        self._refused_or_dead(case, driver, flags, cause)

    def test_model_missing(self, case: Case, driver: Driver, tmp_path: Path) -> None:
        missing = tmp_path / "no-such-model"
        refused = driver("up", str(missing), "--server", case.server, "--port", str(free_port()))
        assert refused.code in (2, 3)
        assert "checkpoint_missing" in refused.err
        dies_by_hand(case, driver, missing, tmp_path, "checkpoint_missing")

    def test_truncated_weights(self, case: Case, driver: Driver, tmp_path: Path) -> None:
        half = truncated_copy(case.model, tmp_path / "half")
        refused = driver("up", str(half), "--server", case.server, "--port", str(free_port()))
        assert refused.code in (2, 3)
        assert "checkpoint_corrupt" in refused.err
        dies_by_hand(case, driver, half, tmp_path, "checkpoint_corrupt")

    def test_port_held_by_a_stranger(self, case: Case, driver: Driver, tmp_path: Path) -> None:
        port = free_port()
        with stranger(port) as other:
            refused = case.up(driver, "taken", port=port)
            assert refused.code == 3
            assert "port_in_use" in refused.err
            assert str(other.pid) in refused.err
            waited = driver("wait", f":{port}", "--server", case.server, "--timeout", "3", "--json")
            assert waited.code != 0, "a stranger's 200 is no readiness"
            dies_by_hand(case, driver, case.model, tmp_path, "port_in_use", port=port)

    def _refused_or_dead(self, case: Case, driver: Driver, flags: Sequence[str], cause: str) -> None:
        with Beat() as beat:
            up = case.up(driver, "failing", "--no-plan", flags=flags)
        assert up.code == 4, up.told
        dead = up.event("dead")
        assert dead["cause"] == cause, dead
        assert not [event for event in up.events if event["event"] == "ready"]
        self._assert_soon(case, driver, "failing", up, beat)
        assert_nothing_left(driver, "failing", [])

    def _assert_soon(self, case: Case, driver: Driver, name: str, up: Result, beat: Beat) -> None:
        """From the first of: an error line read, the exit of the API server.
        The log's last write bounds it from outside.
        """
        first = min(event["at"] for event in up.events if event["event"] in ("log", "exited"))
        dead = up.event("dead")["at"]
        beat.assert_soon(f"{case.server}, {name}", dead, first)
        if driver.record(name)["exit_code"] is not None:
            written = (driver.home / "runs" / name / "server.log").stat().st_mtime
            beat.assert_soon(f"{case.server}, {name}, by its log", dead, written)


def dies_by_hand(case: Case, driver: Driver, model: Path, folder: Path, cause: str, port: int | None = None) -> None:
    """Started by somebody else: only its pid and its log are known."""
    port = port or free_port()
    log = folder / "hand.log"
    argv, env = case.hand(model, port)
    with by_hand(argv, env, log) as child:
        waited = driver(
            "wait", f"http://127.0.0.1:{port}", "--pid", str(child.pid), "--log", str(log), "--server", case.server,
            "--json", timeout_s=case.ready_s,
        )  # fmt: skip
    assert waited.code == 4, f"{waited.out[-2000:]}\n{log.read_text(errors='replace')[-2000:]}"
    assert waited.event("dead")["cause"] == cause, waited.event("dead")


def _titled(driver: Driver, name: str, title: str) -> int | None:
    """The pid of the run's process with ``title``, once it is on record."""
    try:
        names = driver.record(name)["member_names"]
    except (OSError, ValueError):
        return None
    found = [int(pid) for pid, text in names.items() if title in text and process_state(int(pid)) is not None]
    return found[0] if found else None


def _logged(driver: Driver, name: str, words: str, timeout_s: float) -> bool:
    """Whether the run's log comes to hold ``words``; looked at often, because what follows them may be short."""
    path, deadline = driver.home / "runs" / name / "server.log", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if words in path.read_text(errors="replace"):
            return True
        time.sleep(0.002)
    return False
