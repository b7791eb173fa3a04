"""Processes on the real machine: identity, trees, sessions, and signals that cannot hit a stranger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.machine import processes
from forebay.machine.local import LocalMachine
from forebay.machine.proc_stat import parse_stat


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.fixture
def machine() -> LocalMachine:
    return LocalMachine()


@pytest.fixture
def sleeper() -> object:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield child
    child.kill()
    child.wait()


def test_a_process_name_may_hold_brackets_and_spaces() -> None:
    fields = " ".join(str(n) for n in range(1, 50))
    stat = parse_stat(f"42 (a) b (c)) S {fields}")
    assert (stat.name, stat.state, stat.ppid) == ("a) b (c)", "S", 1)


def test_we_see_ourselves(machine: LocalMachine) -> None:
    info = processes.read_process(machine, os.getpid())
    assert info is not None
    assert info.ppid == os.getppid()
    assert info.sid == os.getsid(0)
    assert info.rss_bytes > 10**6
    assert "pytest" in info.command
    assert not info.is_zombie


def test_a_pid_without_a_process_is_none(machine: LocalMachine) -> None:
    assert processes.read_process(machine, 2**22 - 3) is None
    assert processes.identify(machine, 2**22 - 3) is None
    assert processes.io_bytes(machine, 2**22 - 3) is None


def test_a_signal_reaches_exactly_the_process_meant(machine: LocalMachine, sleeper: subprocess.Popen[bytes]) -> None:
    who = processes.identify(machine, sleeper.pid)
    assert who is not None
    reused = processes.ProcessId(who.pid, who.start_ticks + 1, who.boot_id)
    rebooted = processes.ProcessId(who.pid, who.start_ticks, "another boot")
    assert not processes.send_signal(machine, reused, signal.SIGKILL)
    assert not processes.send_signal(machine, rebooted, signal.SIGKILL)
    assert processes.is_running(machine, who)
    assert not processes.is_running(machine, reused)
    assert processes.send_signal(machine, who, signal.SIGTERM)
    assert sleeper.wait(20) == -signal.SIGTERM
    assert not processes.is_running(machine, who)
    assert not processes.send_signal(machine, who, signal.SIGTERM)


def test_a_stopped_process_and_a_zombie_are_seen_as_such(
    machine: LocalMachine, sleeper: subprocess.Popen[bytes]
) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)

    def stopped() -> bool:
        info = processes.read_process(machine, sleeper.pid)
        return info is not None and info.is_stopped

    until(stopped)
    who = processes.identify(machine, sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)

    def zombie() -> bool:
        info = processes.read_process(machine, sleeper.pid)
        return info is not None and info.is_zombie

    until(zombie)  # nobody has waited for it yet; its parent is us
    info = processes.read_process(machine, sleeper.pid)
    assert info is not None
    assert info.ppid == os.getpid()
    assert who is not None
    assert not processes.is_running(machine, who)


def test_an_orphan_leaves_the_tree_and_stays_in_the_session(machine: LocalMachine, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys, pathlib;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(note)!r}).write_text(str(p.pid)); input()"
    )
    front = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, start_new_session=True)
    try:
        until(lambda: note.exists() and note.read_text() != "")
        orphan = int(note.read_text())
        everyone = processes.all_processes(machine)
        assert [info.pid for info in processes.descendants(everyone, front.pid)] == [orphan]
        front.kill()
        front.wait()
        everyone = processes.all_processes(machine)
        assert processes.descendants(everyone, front.pid) == []
        assert [info.pid for info in processes.session_members(everyone, front.pid)] == [orphan]
    finally:
        front.kill()
        if note.exists():
            os.kill(int(note.read_text()), signal.SIGKILL)


def test_a_spawned_child_has_its_own_session_and_its_output_in_the_log(machine: LocalMachine, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    script = "import os, sys; print('out', os.environ['X']); print('err', file=sys.stderr); sys.exit(7)"
    child = machine.spawn([sys.executable, "-c", script], env={"X": "1"}, cwd=str(tmp_path), log_path=str(log))
    assert child.wait(20) == 7
    assert child.poll() == 7
    assert sorted(log.read_text().split()) == ["1", "err", "out"]


def test_environment_of_a_process(machine: LocalMachine, sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.environment(machine, sleeper.pid)
    assert found is not None
    assert found.get("PATH") == os.environ.get("PATH")
