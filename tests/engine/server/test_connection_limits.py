"""What one client may take of the server: body and head sizes, time, connections, answers that it does not read."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, resident_bytes

pytestmark = pytest.mark.engine

TIMEOUT_S = 2
CONNECTIONS = 40
MIB = 2**20


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Impatient, and with room for few connections."""
    log = tmp_path_factory.mktemp("limits") / "server.log"
    running = ServerProcess(
        str(tiny_folder), log, "--served-model-name", "tiny", "--client-timeout", str(TIMEOUT_S),
        "--max-connections", str(CONNECTIONS),
    )  # fmt: skip
    yield running
    running.kill()


@contextlib.contextmanager
def connection(server: ServerProcess, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as made:
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(60)
        made.connect((host, int(port)))
        yield made


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            answer += data
    return answer


def drip(client: socket.socket, data: bytes, every_s: float) -> None:
    """Send one byte after the other until the other side has had enough."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in data:
                client.sendall(bytes([byte]))
                time.sleep(every_s)

    threading.Thread(target=send, daemon=True).start()


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def test_a_chunked_body_without_end_is_answered_413_and_not_kept(server: ServerProcess) -> None:
    before = resident_bytes(server.process.pid)
    with connection(server) as client:
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 400 * MIB:
                client.sendall(b"100000\r\n" + b" " * MIB + b"\r\n")
                sent += MIB
        answer = read_all(client)
    assert sent < 400 * MIB, "the server read on and on"
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert resident_bytes(server.process.pid) - before < 100 * MIB
    assert server.get("/health").status == 200


def test_an_announced_body_that_is_too_large_is_answered_413_before_it_comes(server: ServerProcess) -> None:
    with connection(server) as client:
        client.sendall(HEAD + b"content-length: 100000000000\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"x-filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 4000,
        b"GET /" + b"a" * 200_000,
    ],
    ids=["many fields", "a long path"],
)
def test_a_head_that_is_too_large_is_answered_431(head: bytes, server: ServerProcess) -> None:
    with connection(server) as client:
        with contextlib.suppress(OSError):
            client.sendall(head)
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


def test_trailers_without_end_end_the_connection(server: ServerProcess) -> None:
    with connection(server) as client:
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 400 * MIB:
                client.sendall(b"x: " + b"y" * (MIB - 5) + b"\r\n")
                sent += MIB
        read_all(client)
    assert sent < 400 * MIB


def test_a_head_of_one_byte_at_a_time_is_ended_by_the_deadline(server: ServerProcess) -> None:
    with connection(server) as client:
        drip(client, b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 1000, 0.2)
        assert read_all(client).startswith(b"HTTP/1.1 408 ")


def test_a_connection_without_any_request_is_ended_by_the_deadline(server: ServerProcess) -> None:
    with connection(server) as client:
        assert read_all(client).startswith(b"HTTP/1.1 408 ")


def test_a_body_of_one_byte_at_a_time_is_ended_by_the_deadline(server: ServerProcess) -> None:
    with connection(server) as client:
        client.sendall(HEAD + b"content-length: 5000\r\n\r\n")
        drip(client, b" " * 5000, 0.2)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer


def test_a_refused_client_that_goes_on_sending_its_body_is_ended(server: ServerProcess) -> None:
    with connection(server) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n")
        drip(client, b" " * 5000, 0.2)
        assert read_all(client).startswith(b"HTTP/1.1 404 ")


def test_a_stray_line_end_after_a_body_harms_no_long_answer(server: ServerProcess) -> None:
    """Some clients send CR LF after a body; the timer of the next head must not run while this answer is made."""
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 400, "n": 60, "ignore_eos": True}).encode()
    with connection(server) as client:
        client.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body + b"\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def test_more_connections_than_allowed_are_answered_503_and_old_ones_make_room(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(connection(server))
        with connection(server) as one_more:
            answer = read_all(one_more)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in answer
        server.wait_until(lambda: server.get("/health").status == 200, "idle connections were ended")


def test_a_client_that_never_reads_its_stream_gives_everything_back(server: ServerProcess) -> None:
    body = {
        "model": "tiny",
        "prompt": "a",
        "max_tokens": 500,
        "n": 60,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    data = json.dumps(body).encode()
    cancelled = server.metric("forebay_requests_finished_total", reason="cancelled")
    before = resident_bytes(server.process.pid)
    with connection(server, receive_buffer=4096) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(data) + data)
        server.wait_until(
            lambda: (
                server.metric("forebay_requests_finished_total", reason="cancelled") == cancelled + 60
                or server.get("/status").json()["http_requests"] == 0
            ),
            "the unread stream is given up",
        )
    assert resident_bytes(server.process.pid) - before < 100 * MIB
    assert server.metric("forebay_requests") == 0
    assert server.metric("forebay_cache_leases") == 0
    assert server.metric("forebay_tier_tokens", tier="device", state="held") == 0


def test_a_client_that_reads_slowly_gets_all_of_its_stream(server: ServerProcess) -> None:
    body = {
        "model": "tiny",
        "prompt": "a",
        "max_tokens": 300,
        "n": 20,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    data = json.dumps(body).encode()
    with connection(server, receive_buffer=4096) as client:
        client.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        answer, began = b"", time.monotonic()
        while chunk := client.recv(65536):
            answer += chunk
            if time.monotonic() - began < 2.5 * TIMEOUT_S:  # slower than the server sends, for longer than its patience
                time.sleep(0.05)
    assert b"data: [DONE]" in answer
