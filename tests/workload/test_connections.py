"""The HTTP client against servers that answer in every legal way, and in some that are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from forebay.errors import UsageError
from forebay.workload.client import Client
from forebay.workload.connections import Connections
from forebay.workload.failures import FailureKind, RequestFailure

_Handler = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def _request(reader: asyncio.StreamReader) -> bytes:
    """One whole request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
    return head + await reader.readexactly(int(length or 0))


@asynccontextmanager
async def _serving(handler: _Handler, *, read_timeout_s: float = 30.0) -> AsyncIterator[Connections]:
    """Connections to a server that gives each connection, numbered from 0, to ``handler``."""
    count = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        number, count = count, count + 1
        try:
            await handler(number, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connections = Connections(url, headers={}, read_timeout_s=read_timeout_s)
    try:
        yield connections
    finally:
        connections.close()
        server.close()


async def test_one_connection_serves_requests_one_after_the_other_and_more_serve_them_at_once() -> None:
    seen: list[int] = []

    async def handler(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await _request(reader)
            seen.append(number)
            writer.write(_OK)

    async with _serving(handler) as connections:
        for _ in range(3):
            assert (await connections.request("POST", "/x", b"{}")).body == b"hi"
        assert seen == [0, 0, 0]
        await asyncio.gather(*[connections.request("GET", "/x", None) for _ in range(3)])
        assert len(set(seen)) == 3


@pytest.mark.parametrize("cut", range(1, 90, 7))
async def test_a_chunked_body_may_arrive_cut_anywhere(cut: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"

    async def handler(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(whole[:cut])
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(whole[cut:])
        await _request(reader)

    pieces: list[bytes] = []
    async with _serving(handler) as connections:
        reply = await connections.request("POST", "/x", b"{}", lambda piece, _now: pieces.append(piece))
    assert (b"".join(pieces), reply.body) == (b"hello, world", b"")


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async def handler(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of ")
        await writer.drain()
        writer.write(b"it")

    async with _serving(handler) as connections:
        assert (await connections.request("GET", "/x", None)).body == b"all of it"


async def test_a_body_cut_short_is_broken_and_an_idle_connection_closed_under_us_is_not() -> None:
    async def handler(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        if number == 2:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
            return
        writer.write(_OK)
        await _request(reader)  # the first connection reads the second request, and closes without a word

    async with _serving(handler) as connections:
        await connections.request("GET", "/x", None)
        await asyncio.sleep(0.6)
        assert (await connections.request("POST", "/x", b"{}")).status == 200  # asked again on a second connection
        with pytest.raises(RequestFailure) as caught:  # in the middle of work it is a failure: the row must know
            await connections.request("POST", "/x", b"{}")
        assert caught.value.kind is FailureKind.BROKEN
        with pytest.raises(RequestFailure) as caught:
            await connections.request("POST", "/x", b"{}")
        assert caught.value.kind is FailureKind.BROKEN


async def test_what_is_not_http_is_a_bad_answer_and_silence_is_a_timeout() -> None:
    async def handler(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        if number == 0:
            writer.write(b"SSH-2.0-OpenSSH\r\n")
        await reader.read()

    async with _serving(handler, read_timeout_s=0.2) as connections:
        kinds = []
        for _ in range(2):
            with pytest.raises(RequestFailure) as caught:
                await connections.request("GET", "/x", None)
            kinds.append(caught.value.kind)
    assert kinds == [FailureKind.BAD_ANSWER, FailureKind.TIMEOUT]


async def test_a_request_given_up_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def handler(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        if not await reader.read():
            gone.set()

    async with _serving(handler) as connections:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connections.request("GET", "/x", None)
        await asyncio.wait_for(gone.wait(), 5)


async def test_nothing_listening_says_where() -> None:
    client = Client("http://127.0.0.1:9")
    with pytest.raises(RequestFailure, match=r"127\.0\.0\.1:9") as caught:
        await client.get("/health")
    assert caught.value.kind is FailureKind.CONNECT


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://[::1:80", "http://höst:80"])
def test_what_is_no_address_is_said_at_once(url: str) -> None:
    with pytest.raises(UsageError, match="not the address of a server"):
        Client(url)


@pytest.mark.parametrize("key", ["secret\r", "sécret"])
def test_a_key_that_no_header_can_carry_is_said_at_once_and_not_shown(key: str) -> None:
    with pytest.raises(UsageError, match="Authorization") as caught:
        Client("http://host:80", api_key=key)
    assert "cret" not in str(caught.value)


async def test_a_response_nobody_asked_for_answers_no_later_request() -> None:
    async def handler(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(_OK + b"HTTP/1.1 408 Late\r\nContent-Length: 2\r\n\r\n")
        await _request(reader)
        writer.write(b"no")

    async with _serving(handler) as connections:
        for _ in range(2):
            assert (await connections.request("GET", "/x", None)).body == b"hi"


async def test_pieces_come_after_an_informational_response_and_what_their_taker_raises_comes_out() -> None:
    async def handler(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await _request(reader):
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" + _OK)

    def refuse(piece: bytes, _now: float) -> None:
        raise LookupError(piece)

    async with _serving(handler) as connections:
        pieces: list[bytes] = []
        await connections.request("GET", "/x", None, lambda piece, _now: pieces.append(piece))
        assert pieces == [b"hi"]
        with pytest.raises(LookupError):
            await connections.request("GET", "/x", None, refuse)


async def test_work_that_a_server_died_over_is_not_sent_again() -> None:
    asked = 0

    async def handler(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await _request(reader)
        writer.write(_OK)
        await _request(reader)
        asked += 1
        await asyncio.sleep(1.1)

    async with _serving(handler) as connections:
        await connections.request("GET", "/x", None)
        await asyncio.sleep(0.6)
        with pytest.raises(RequestFailure) as caught:
            await connections.request("POST", "/x", b"{}")
    assert caught.value.kind is FailureKind.BROKEN
    assert asked == 1
