"""Driving `forebay` as a user does, against real servers, in a home of its own; nothing here knows forebay's inside."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
ADDRESS_SPACE_BYTES = 16_000_000_000


@dataclass
class Result:
    """A command that ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def told(self) -> str:
        """For a failed assertion; with --json what happened is on standard output."""
        return f"exit code {self.code} after {self.seconds:.1f} s\n{self.out[-3000:]}\n{self.err[-2000:]}"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    def event(self, kind: str) -> dict[str, Any]:
        found = [event for event in self.events if event["event"] == kind]
        assert found, f"no {kind!r} among {[event['event'] for event in self.events]}\n{self.err[-2000:]}"
        return found[-1]


def confined() -> None:
    """In the child: an oversized pool must fail by itself, and never take this machine along."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


@dataclass
class Driver:
    """`forebay` with a FOREBAY_HOME of its own. Whatever it brought up is taken down by ``clean``."""

    home: Path
    names: list[str] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "FOREBAY_HOME": str(self.home)}

    def __call__(self, *words: str, timeout_s: float = 300.0) -> Result:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli", *words],
            env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False, preexec_fn=confined,
        )  # fmt: skip
        return Result(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command in the background, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "forebay.cli", *words],
            env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=confined,
            start_new_session=True,
        )  # fmt: skip

    def record(self, name: str) -> dict[str, Any]:
        return json.loads((self.home / "runs" / name / "run.json").read_text())  # type: ignore[no-any-return]

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.home / "runs" / name / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_event(self, name: str, kind: str, *, after: float = 0.0, timeout_s: float = 60.0) -> dict[str, Any]:
        """The first event of ``kind`` written after wall clock ``after``."""

        def found() -> dict[str, Any] | None:
            return next((e for e in self.events(name) if e["event"] == kind and e["at"] >= after), None)

        event = until(found, timeout_s)
        seen = [e["event"] for e in self.events(name)]
        assert event is not None, f"no {kind!r} within {timeout_s} s; events: {seen}; log:\n{self.log_tail(name)}"
        return event

    def log_tail(self, name: str, size: int = 3000) -> str:
        path = self.home / "runs" / name / "server.log"
        return path.read_text(errors="replace")[-size:] if path.exists() else ""

    def clean(self) -> None:
        for folder in (self.home / "runs").glob("*/run.json"):
            self("down", folder.parent.name, "--drain-seconds", "2")


class Beat:
    """A thread that only sleeps: by how much it is woken late is what this machine costs everybody at the moment."""

    _EVERY_S = 0.02

    def __init__(self) -> None:
        self.late_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            time.sleep(self._EVERY_S)
            self.late_s = max(self.late_s, time.monotonic() - began - self._EVERY_S)

    def assert_soon(self, what: str, verdict_at: float, evidence_at: float) -> None:
        """2 s from the evidence to the verdict, which takes some ten turns of threads and processes to come about."""
        lag = verdict_at - evidence_at
        print(f"{what}: {lag:.2f} s after its evidence (a sleeping thread was {self.late_s:.2f} s late at worst)")
        assert lag <= 2.0 + 10 * self.late_s, what


def gone_at(pid: int) -> float:
    """Wall clock at which ``pid`` is seen dead (or a zombie) by a look every few milliseconds."""
    return _state_at(pid, (None, "Z"))


def stopped_at(pid: int) -> float:
    """Wall clock at which ``pid`` is seen stopped."""
    return _state_at(pid, ("T", "t"))


def _state_at(pid: int, states: tuple[str | None, ...]) -> float:
    deadline = time.monotonic() + 60
    while process_state(pid) not in states:
        assert time.monotonic() < deadline, f"pid {pid} is in state {process_state(pid)}"
        time.sleep(0.005)
    return time.time()


def until(look: Callable[[], Any], timeout_s: float) -> Any:
    """``look`` again and again until it is true; its value, or None when time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    return None


@contextlib.contextmanager
def stranger(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another program's HTTP server on ``port``: answers 200 to everything that its folder has."""
    child = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert until(lambda: _listens(port), 10.0)
        yield child
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def by_hand(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server started by hand, its output in ``log``; ended with its session."""
    with log.open("wb") as sink:
        child = subprocess.Popen(
            list(command), env={**os.environ, **env}, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=confined,
        )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()  # what it shares in /dev/shm it unlinks itself, when it is let
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def process_state(pid: int) -> str | None:
    """The kernel's letter, None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pid_of(record: Mapping[str, Any], title: str) -> int:
    """The pid of the run's process whose role and title contain ``title``."""
    found = [int(pid) for pid, name in record["member_names"].items() if title in name]
    alive = [pid for pid in found if process_state(pid) not in (None, "Z")]
    assert alive, f"no {title!r} among {record['member_names']}"
    return alive[-1]


def assert_nothing_left(driver: Driver, name: str, pids: Sequence[int]) -> None:
    """``down`` says so, and the kernel agrees."""
    down = driver("down", name, "--json")
    report = json.loads(down.out)
    assert down.code == 0, report
    assert report["clean"], report
    alive = {pid: process_state(pid) for pid in pids if process_state(pid) is not None}
    assert not alive
    shm = set(driver.record(name)["shm_names"])
    assert not [file.name for file in Path("/dev/shm").iterdir() if file.name in shm]
