"""HTTP/1.1 with keep-alive to one server.

At thousands of requests per second the load generator itself is the bottleneck, so a request is one write, one future,
and httptools' parser (llhttp) called from the socket's callback. Pieces of a stream are passed on, with their time, as
they arrive. Not supported, because inference servers do not use them: redirects, cookies, proxies, compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

from forebay.errors import UsageError
from forebay.workload.failures import FailureKind, RequestFailure

__all__ = ["Connections", "HttpReply"]

OnPiece = Callable[[bytes, float], None]
"""Called with a piece of the body of a 200 and the time it arrived (``time.perf_counter`` seconds)."""

_CONNECT_S = 10.0
_MAX_IDLE_S = 60.0  # a connection idle for longer is not used again
_STALE_S = 0.5  # the server may close a connection that was idle for so long just as it is used
_STALE_LOST_S = 1.0  # such a connection is lost within this time; one lost later died with the request


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole response; ``body`` is empty when its pieces were handed to ``on_piece``."""

    status: int
    body: bytes
    retry_after: str | None


class Connections:
    """All connections to one server: one per request in flight. Belongs to the event loop that first uses it.

    Args:
        url: ``http`` or ``https``; a path in it is put before the path of each request.
        headers: sent with every request.
        read_timeout_s: longest time without a byte on an open request.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], read_timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _bad_url(url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise _bad_url(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        fixed = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "forebay", "Accept": "*/*", **headers}
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):  # the value is not shown, because it may be a key
                raise UsageError(
                    f"the {name} header cannot be sent", fix="check the key for line ends and letters outside ASCII"
                )
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items()).encode("ascii")
        self._read_timeout_s = read_timeout_s
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def request(self, method: str, path: str, body: bytes | None, on_piece: OnPiece | None = None) -> HttpReply:
        """Send one request and read its response.

        When the server closes an idle connection just as it is used, the request is sent once more.

        Raises:
            RequestFailure: CONNECT, BROKEN, TIMEOUT, or BAD_ANSWER for what is not HTTP. Errors of ``on_piece`` are
                passed on.
        """
        data = self._encoded(method, path, body)
        connection = self._take_idle()
        if connection is not None:
            sent = perf_counter()
            stale = sent - connection.idle_since >= _STALE_S
            try:
                return await self._exchange(connection, data, on_piece)
            except RequestFailure:
                lost = connection.lost and perf_counter() - sent < _STALE_LOST_S
                if not stale or not lost or connection.received_any:
                    raise
        return await self._exchange(await self._open(), data, on_piece)

    def close(self) -> None:
        """Close every connection; open requests fail."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def _encoded(self, method: str, path: str, body: bytes | None) -> bytes:
        first = f"{method} {self._path}{path} HTTP/1.1\r\n".encode("latin-1")
        if body is None:
            length = b"" if method == "GET" else b"Content-Length: 0\r\n"
            return first + self._head + length + b"\r\n"
        described = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return first + self._head + described + body

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and perf_counter() - connection.idle_since < _MAX_IDLE_S:
                return connection
            connection.abort()
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise RequestFailure(FailureKind.CONNECT, f"no connection within {_CONNECT_S:.0f} s") from error
        except OSError as error:
            raise RequestFailure(FailureKind.CONNECT, _connect_error(self._host, self._port, error)) from error
        return connection

    async def _exchange(self, connection: _Connection, data: bytes, on_piece: OnPiece | None) -> HttpReply:
        self._busy.add(connection)
        if self._sweeper is None:
            self._sweep_later()
        try:
            reply = await connection.begin(data, on_piece)
        except BaseException:
            connection.abort()
            raise
        finally:
            self._busy.discard(connection)
        if connection.usable:
            self._idle.append(connection)
        return reply

    def _sweep_later(self) -> None:
        every_s = min(1.0, self._read_timeout_s / 4)
        self._sweeper = asyncio.get_running_loop().call_later(every_s, self._sweep)

    def _sweep(self) -> None:
        """Fail requests without a byte for too long; one timer for all requests costs less than one per request."""
        self._sweeper = None
        silent_since = perf_counter() - self._read_timeout_s
        for connection in self._busy:
            if connection.received_at < silent_since:
                connection.fail(RequestFailure(FailureKind.TIMEOUT, f"no byte for {self._read_timeout_s:g} s"))
        if self._busy:
            self._sweep_later()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.usable = False
        self.lost = False
        self.received_any = False  # of the response to the current request
        self.received_at = 0.0
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[HttpReply] | None = None
        self._on_piece: OnPiece | None = None
        self._pieces: list[bytes] = []
        self._retry_after: str | None = None
        self._framed = False  # the response has a length or chunks; else it ends with the connection
        self._in_body = False

    def begin(self, data: bytes, on_piece: OnPiece | None) -> asyncio.Future[HttpReply]:
        """Send a request; the future is its response."""
        assert self._transport is not None, "begin comes after connection_made"
        reply: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()
        self._reply, self._on_piece = reply, on_piece
        self._pieces, self._retry_after = [], None
        self._framed = self._in_body = self.received_any = False
        self.received_at = perf_counter()
        self._transport.write(data)
        return reply

    def abort(self) -> None:
        """Close the connection at once, so that the server stops the request."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def fail(self, failure: BaseException) -> None:
        """End the request with an error, and the connection with it."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(failure)
        self._reply = None
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self.usable = True

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the connection is closed, by either side."""
        self.usable, self.lost = False, True
        if self._in_body and not self._framed:
            self.on_message_complete()
        self.fail(RequestFailure(FailureKind.BROKEN, str(error) if error else "the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        if self._reply is None:  # not an answer to a request: for example a "408" before the server closes
            self.abort()
            return
        self.received_at = perf_counter()
        self.received_any = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raised = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self.fail(raised or RequestFailure(FailureKind.BAD_ANSWER, f"not HTTP: {error}: {data[:60]!r}"))

    def on_message_begin(self) -> None:
        """httptools: a response begins; without an open request, close, so that it is not taken for the next one's."""
        if self._reply is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """httptools: the body follows."""
        status = self._parser.get_status_code()
        if status < 200:  # informational; the response follows
            return
        self._in_body = True
        if status != 200:
            self._on_piece = None

    def on_body(self, piece: bytes) -> None:
        """httptools: a piece of the body."""
        if self._on_piece is not None:
            self._on_piece(piece, self.received_at)
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """httptools: the response is whole."""
        status = self._parser.get_status_code()
        if status < 200 or self._reply is None:
            return
        self.usable = self.usable and self._framed and self._parser.should_keep_alive()
        self._in_body = False
        reply, self._reply = self._reply, None
        self.idle_since = self.received_at
        if not reply.done():
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            reply.set_result(HttpReply(status, body, self._retry_after))
        if not self.usable:
            self.abort()


def _bad_url(url: str) -> UsageError:
    return UsageError(f"{url!r} is not the address of a server", fix="http://HOST:PORT")


def _connect_error(host: str, port: int, error: OSError) -> str:
    why = error.strerror or str(error) or type(error).__name__
    return f"cannot connect to {host}:{port}: {why}"
