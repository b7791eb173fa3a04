"""What a recording machine sees, the recorded folder answers again, failures included."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from forebay.machine import ports, processes, shm
from forebay.machine.interface import HttpFailure, HttpFailureKind, Machine
from forebay.machine.local import LocalMachine
from forebay.machine.memory import read_memory
from forebay.machine.recorded import RecordedMachine, RecordingMachine


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 200 if self.path == "/health" else 503
        self.send_response(status)
        self.send_header("X-Name", "value")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> object:
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def looks(machine: Machine, url: str, refused: str) -> list[object]:
    """A round through the rooms, as plan, doctor and status make it."""
    found: list[object] = [
        read_memory(machine).total_bytes,
        processes.read_process(machine, os.getpid(), cmdline=True).__class__,
        sorted(item.port for item in ports.listeners(machine, owners=False)),
        [item.name for item in shm.shm_files(machine, mappers=False)],
        machine.run(("uname", "-s")).stdout,
        machine.run(("no-such-program",)).exit_code,
    ]
    for address in (f"{url}/health", f"{url}/other"):
        answer = machine.http("GET", address)
        found.append((answer.status, answer.ok, answer.body, answer.headers["x-name"]))
    with pytest.raises(HttpFailure) as caught:
        machine.http("GET", refused)
    found.append(caught.value.kind)
    with pytest.raises(FileNotFoundError):
        machine.read("/proc/no-such-file")
    return found


def test_a_recording_answers_as_the_machine_did(tmp_path: Path, url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused = f"http://127.0.0.1:{free.getsockname()[1]}/"
    recording = RecordingMachine(LocalMachine())
    live = looks(recording, url, refused)
    assert live[-1] is HttpFailureKind.REFUSED
    recording.save(tmp_path / "box")
    assert looks(RecordedMachine(tmp_path / "box"), url, refused) == live


def test_both_are_machines(tmp_path: Path) -> None:
    RecordingMachine(LocalMachine()).save(tmp_path)
    assert isinstance(RecordedMachine(tmp_path), Machine)
    assert isinstance(LocalMachine(), Machine)


def test_acts_on_a_recording_are_noted_and_not_done(tmp_path: Path) -> None:
    RecordingMachine(LocalMachine()).save(tmp_path)
    machine = RecordedMachine(tmp_path)
    assert machine.signal(os.getpid(), 9, 0)
    machine.remove("/dev/shm/x")
    assert machine.acts == [("signal", (os.getpid(), 9, 0)), ("remove", "/dev/shm/x")]
    with pytest.raises(PermissionError):
        machine.spawn(["true"], env={}, cwd=None, log_path="/dev/null")


def test_a_tail_follows_growth_and_notices_replacement(tmp_path: Path) -> None:
    machine, path = LocalMachine(), tmp_path / "log"
    path.write_bytes(b"one\n")
    first = machine.tail(str(path), 0)
    path.write_bytes(b"one\ntwo\n")
    second = machine.tail(str(path), first.offset, first.inode)
    assert (first.data, second.data, second.replaced) == (b"one\n", b"two\n", False)
    path.write_bytes(b"x")
    third = machine.tail(str(path), second.offset, second.inode)
    assert (third.data, third.replaced) == (b"x", True)
