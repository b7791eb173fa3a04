"""Keep-alive HTTP/1.1 to one server: what driving an inference server needs of HTTP, and no more.

A load generator is its own bottleneck at thousands of requests a second, so the path of a request is short: one write,
one future, httptools' parser (llhttp) called straight from the socket. A stream's pieces are handed over, and timed,
where they arrive. Left out because inference servers have no use for them: redirects, cookies, proxies, compression
(none is asked for).
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
"""Takes a piece of a 200's body and when it arrived (``time.perf_counter`` seconds)."""

_CONNECT_S = 10.0
_LONGEST_IDLE_S = 60.0  # an idle connection older than this is not used again
_STALE_S = 0.5  # one idle for so long may have been closed by the server at the moment it is used
_NOTICED_S = 1.0  # that shows at once; a connection lost later is a server that died over the request


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole response; ``body`` is empty when its pieces were handed to ``on_piece``."""

    status: int
    body: bytes
    retry_after: str | None


class Connections:
    """All connections to one server; as many as there are requests at once. Bound to the loop that first uses it.

    Args:
        url: ``http`` or ``https``; a path in it comes before every request's.
        headers: sent with every request.
        read_timeout_s: longest silence on an open request.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], read_timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _no_address(url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise _no_address(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        fixed = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "forebay", "Accept": "*/*", **headers}
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):  # not shown: it may be a key
                raise UsageError(
                    f"the {name} header cannot be sent", fix="is there a line end or a stray letter in the key?"
                )
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items()).encode("ascii")
        self._read_timeout_s = read_timeout_s
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def request(self, method: str, path: str, body: bytes | None, on_piece: OnPiece | None = None) -> HttpReply:
        """Send one request and read its response.

        A connection that lay idle may be closed by the server just as it is used; then the request is sent once more.

        Raises:
            RequestFailure: CONNECT, BROKEN, TIMEOUT, or BAD_ANSWER for what is not HTTP; and whatever ``on_piece``
                raises.
        """
        data = self._encoded(method, path, body)
        connection = self._take_idle()
        if connection is not None:
            sent = perf_counter()
            stale = sent - connection.idle_since >= _STALE_S
            try:
                return await self._exchange(connection, data, on_piece)
            except RequestFailure:
                noticed = connection.lost and perf_counter() - sent < _NOTICED_S
                if not stale or not noticed or connection.heard_anything:
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
            if connection.usable and perf_counter() - connection.idle_since < _LONGEST_IDLE_S:
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
        """One timer for all requests: a timer each would cost more than the requests' own bookkeeping."""
        self._sweeper = None
        silent_since = perf_counter() - self._read_timeout_s
        for connection in self._busy:
            if connection.heard_at < silent_since:
                connection.fail(RequestFailure(FailureKind.TIMEOUT, f"no byte for {self._read_timeout_s:g} s"))
        if self._busy:
            self._sweep_later()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.usable = False
        self.lost = False
        self.heard_anything = False  # of the response to the current request
        self.heard_at = 0.0
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[HttpReply] | None = None
        self._on_piece: OnPiece | None = None
        self._pieces: list[bytes] = []
        self._retry_after: str | None = None
        self._framed = False  # the response says where it ends; else it ends with the connection
        self._in_body = False

    def begin(self, data: bytes, on_piece: OnPiece | None) -> asyncio.Future[HttpReply]:
        """Send a request; the future brings its response."""
        assert self._transport is not None, "begin comes after connection_made"
        reply: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()
        self._reply, self._on_piece = reply, on_piece
        self._pieces, self._retry_after = [], None
        self._framed = self._in_body = self.heard_anything = False
        self.heard_at = perf_counter()
        self._transport.write(data)
        return reply

    def abort(self) -> None:
        """Drop the connection now; the server sees that nobody listens any more."""
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
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        self.usable = True

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the connection is closed, by either side."""
        self.usable, self.lost = False, True
        if self._in_body and not self._framed:
            self.on_message_complete()
        self.fail(RequestFailure(FailureKind.BROKEN, str(error) if error else "the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        if self._reply is None:  # nobody asked: a late "408" before the server closes, at best
            self.abort()
            return
        self.heard_at = perf_counter()
        self.heard_anything = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raised = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self.fail(raised or RequestFailure(FailureKind.BAD_ANSWER, f"not HTTP: {error}: {data[:60]!r}"))

    def on_message_begin(self) -> None:
        """httptools: a response begins; one that nobody asked for would be taken for the next request's."""
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
        if status < 200:  # the response itself comes after it
            return
        self._in_body = True
        if status != 200:
            self._on_piece = None

    def on_body(self, piece: bytes) -> None:
        """httptools: a piece of the body."""
        if self._on_piece is not None:
            self._on_piece(piece, self.heard_at)
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
        self.idle_since = self.heard_at
        if not reply.done():
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            reply.set_result(HttpReply(status, body, self._retry_after))
        if not self.usable:
            self.abort()


def _no_address(url: str) -> UsageError:
    return UsageError(f"{url!r} is not the address of a server", fix="http://HOST:PORT")


def _connect_error(host: str, port: int, error: OSError) -> str:
    why = error.strerror or str(error) or type(error).__name__
    return f"cannot connect to {host}:{port}: {why}"
