"""Stopping real small processes: only what the run owns, orphans included, and never a stranger."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from operator_driving import process_state, until

from forebay.machine.local import LocalMachine
from forebay.machine.processes import ProcessId, identify
from forebay.operation.stop.stop_run import stop_run
from forebay.runs.owned_processes import owned_processes
from forebay.runs.run_record import Run, RunRecord, create_run

MACHINE = LocalMachine()
_PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; {child}; time.sleep(600)"])
print(child.pid, flush=True)
{parent}
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))


@pytest.fixture
def tree() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def start(tree: list[subprocess.Popen[str]], parent: str = "pass", child: str = "pass") -> tuple[Run, list[int]]:
    api_server = subprocess.Popen(
        [sys.executable, "-c", _PARENT.format(parent=parent, child=child)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    tree.append(api_server)
    assert api_server.stdout is not None
    below = int(api_server.stdout.readline())
    time.sleep(0.3)  # the child's signal handler must be in place
    who = identify(MACHINE, api_server.pid)
    record = RunRecord(
        name="one", server="unknown", model="m", version="1", command=["x"], env={}, host="127.0.0.1", port=1,
        run_id="one", created_at=time.time(), state="ready", api_server=who,
    )  # fmt: skip
    run = create_run(record, replace=lambda _old: False)
    return run, [api_server.pid, below]


def reaped(tree: list[subprocess.Popen[str]]) -> None:
    """In these tests the test itself is the parent that must reap."""
    for process in tree:
        process.poll()


def test_api_server_and_child_end_and_the_proof_says_so(tree: list[subprocess.Popen[str]]) -> None:
    run, pids = start(tree)
    report = stop_run(MACHINE, run, drain_s=5.0, sleep=lambda s: (reaped(tree), time.sleep(s))[1])
    assert report.clean, report.cleanup
    assert "SIGTERM to the API server" in report.steps[0]
    assert until(lambda: process_state(pids[1]) is None, 5.0)
    assert run.read().state == "stopped"


def test_what_ignores_sigterm_is_killed_after_its_time(tree: list[subprocess.Popen[str]]) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    run, _ = start(tree, parent=deaf, child="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    report = stop_run(MACHINE, run, drain_s=0.5, sleep=lambda s: (reaped(tree), time.sleep(s))[1])
    assert report.clean
    assert any("did not end within" in step for step in report.steps)
    assert sum("SIGKILL" in step for step in report.steps) == 2


def test_orphans_of_a_killed_api_server_are_found_by_their_session(tree: list[subprocess.Popen[str]]) -> None:
    run, pids = start(tree)
    os.kill(pids[0], signal.SIGKILL)
    tree[0].wait()
    assert process_state(pids[1]) is not None
    assert [info.pid for info in owned_processes(MACHINE, run.read())] == [pids[1]]
    assert stop_run(MACHINE, run).clean
    assert process_state(pids[1]) is None


def test_a_stranger_with_the_number_of_the_api_server_is_left_alone(tree: list[subprocess.Popen[str]]) -> None:
    run, pids = start(tree)
    record = run.read()
    assert record.api_server is not None
    reused = ProcessId(pids[0], record.api_server.start_ticks - 500, record.api_server.boot_id)
    run.update(lambda now: setattr(now, "api_server", reused))
    report = stop_run(MACHINE, run)
    assert report.steps == []
    assert process_state(pids[0]) in ("S", "R")


def test_after_a_reboot_nothing_is_signalled(tree: list[subprocess.Popen[str]]) -> None:
    run, pids = start(tree)
    record = run.read()
    assert record.api_server is not None
    before = ProcessId(pids[0], record.api_server.start_ticks, "another-boot")
    run.update(lambda now: setattr(now, "api_server", before))
    report = stop_run(MACHINE, run)
    assert report.clean
    assert "rebooted" in report.steps[0]
    assert process_state(pids[0]) in ("S", "R")


def test_a_zombie_names_the_parent_that_must_reap_it(tree: list[subprocess.Popen[str]]) -> None:
    run, pids = start(tree)
    report = stop_run(MACHINE, run, drain_s=1.0)  # the test, its parent, does not reap it
    assert not report.clean
    assert report.cleanup is not None
    text = report.cleanup.checks[0].found
    assert f"pid {pids[0]} is a zombie; its parent {os.getpid()}" in text
    assert report.cleanup.checks[0].fix is not None
    assert str(os.getpid()) in report.cleanup.checks[0].fix


def test_shared_memory_of_the_run_is_unlinked_only_when_nobody_maps_it(tree: list[subprocess.Popen[str]]) -> None:
    name = f"forebay-test-{os.getpid()}"
    path = Path("/dev/shm") / name
    path.write_bytes(b"x" * 4096)
    try:
        run, _ = start(tree)
        run.update(lambda now: now.shm_names.append(name))
        with path.open("rb"):
            kept = stop_run(MACHINE, run, sleep=lambda s: (reaped(tree), time.sleep(s))[1])
            assert not kept.clean
            assert path.exists()
        gone = stop_run(MACHINE, run, sleep=lambda s: (reaped(tree), time.sleep(s))[1])
        assert gone.clean
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
