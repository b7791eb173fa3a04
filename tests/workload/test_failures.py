"""What a failure of a request means for its row and its server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.runs.run_record import RunRecord, create_run
from forebay.workload.client import Client
from forebay.workload.failures import FailureKind, RequestFailure, kind_of_status
from forebay.workload.generate.dispatch import Dispatcher
from forebay.workload.target import resolve


@asynccontextmanager
async def _answering(reply: bytes) -> AsyncIterator[Client]:
    """A client of a server that says ``reply`` to everything."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FailureKind.REFUSED),
        (404, FailureKind.NOT_ALLOWED),
        (408, FailureKind.SERVER_ERROR),
        (425, FailureKind.SERVER_ERROR),
        (429, FailureKind.RATE_LIMITED),
        (500, FailureKind.SERVER_ERROR),
        (503, FailureKind.UNAVAILABLE),
    ],
)
def test_the_status_says_whether_another_try_may_help(status: int, kind: FailureKind) -> None:
    assert kind_of_status(status) is kind


@pytest.mark.parametrize("error", ['{"message": "out of pages", "code": 500}', '"out of pages"'])
async def test_an_error_inside_a_stream_is_one_though_the_stream_ends_well(error: str) -> None:
    events = f'data: {{"choices": [{{"text": "a"}}]}}\n\ndata: {{"error": {error}}}\n\ndata: [DONE]\n\n'
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    async with _answering((head + events).encode()) as client:
        with pytest.raises(RequestFailure, match="out of pages") as caught:
            await client.stream({"model": "m", "prompt": "x"})
    assert caught.value.kind is FailureKind.SERVER_ERROR


@pytest.mark.parametrize(
    ("host", "url"),
    [("::1", "http://[::1]:8000"), ("::", "http://[::1]:8000"), ("0.0.0.0", "http://127.0.0.1:8000")],
)
def test_a_run_s_address_is_one_that_can_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    record = RunRecord(
        name="mine",
        server="vllm",
        model="m",
        version="1",
        command=[],
        env={},
        host=host,
        port=8000,
        run_id="1",
        created_at=0.0,
    )
    create_run(record, replace=lambda _old: False)
    assert resolve("mine") == url


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("http://host:1/prefix/v1", "http://host:1/prefix"),
        ("https://host/", "https://host"),
        (":9", "http://127.0.0.1:9"),
        ("[::1]:9", "http://[::1]:9"),
    ],
)
def test_an_address_is_taken_as_it_is(name: str, url: str) -> None:
    assert resolve(name) == url


def _dispatcher(server: Any, works: list[Any]) -> Dispatcher:
    ready = deque(works)
    pool = SimpleNamespace(
        servers=[server],
        ready=ready,
        errors=Counter(),
        next_work=lambda _: ready.popleft() if ready else None,
        mark_down=lambda *_: setattr(server, "up", False),
    )
    nothing: Any = SimpleNamespace(snapshot=lambda: None, row_tries=3)
    return Dispatcher(nothing, pool, nothing, nothing, nothing, nothing)  # type: ignore[arg-type]


async def test_a_worker_cancelled_before_its_first_step_returns_its_row() -> None:
    server = SimpleNamespace(in_flight=0, workers=set(), over_limit=False, has_room=lambda _: server.in_flight < 2)
    works: list[Any] = [SimpleNamespace(name="first"), SimpleNamespace(name="second")]
    dispatcher = _dispatcher(server, works)
    dispatcher._start_workers()
    assert server.in_flight == 2
    workers = list(server.workers)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await asyncio.sleep(0)
    assert server.in_flight == 0
    assert server.workers == set()
    assert {work.name for work in dispatcher._pool.ready} == {"first", "second"}


async def test_retry_after_is_obeyed_on_a_503_too() -> None:
    server: Any = SimpleNamespace(
        up=True, paused_until=0.0, limit=SimpleNamespace(failed=lambda *_: None), url="http://x", client=None
    )
    work = SimpleNamespace(tries=0)
    dispatcher = _dispatcher(server, [])
    failure = RequestFailure(FailureKind.UNAVAILABLE, "HTTP 503", status=503, retry_after_s=7.0)
    now = time.monotonic()
    dispatcher._handle_failure(server, work, failure, now)  # type: ignore[arg-type]
    assert now + 6.9 < server.paused_until < now + 8
    assert not server.up
