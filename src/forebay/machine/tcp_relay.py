"""Many TCP connections over one pair of byte streams (stdin and stdout of a helper), for hosts that SSH cannot forward
into.

A frame is 9 bytes of head (type, connection, length; network order) and its bytes. Either side may close a connection.
Both ends use the same ``Relay``: one accepts local connections, the other one makes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Awaitable, Callable

__all__ = ["Relay", "feed_from"]

_HEAD = struct.Struct("!BII")
_OPEN, _DATA, _CLOSE, _BEAT = 1, 2, 3, 4
_PIECE = 1 << 16
_MAX_QUEUED = 1 << 24  # of one connection whose reader does not read
BEAT_S = 5.0
SILENT_S = 20.0

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class _Connection:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.queued = 0


class Relay:
    """One end.

    Args:
        reader, write: the streams to the other end; ``write`` takes whole frames.
        connect: makes a connection for each one that the other end accepted; None where this end accepts.
    """

    def __init__(self, reader: asyncio.StreamReader, write: Callable[[bytes], None], connect: Connect | None) -> None:
        self._reader = reader
        self._write = write
        self._connect = connect
        self._connections: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next = 1

    async def run(self) -> None:
        """Carry frames until the other end is gone; then every connection is closed."""
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                head = await asyncio.wait_for(self._reader.readexactly(_HEAD.size), SILENT_S)
                kind, number, length = _HEAD.unpack(head)
                data = await asyncio.wait_for(self._reader.readexactly(length), SILENT_S) if length else b""
                self._take(kind, number, data)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, OSError):
            return
        finally:
            beat.cancel()
            for number in list(self._connections):
                self._close(number)

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection that this end accepted, until it is closed."""
        number, self._next = self._next, self._next + 1
        self._connections[number] = _Connection(writer)
        self._send(_OPEN, number)
        await self._pump(number, reader)

    def _take(self, kind: int, number: int, data: bytes) -> None:
        if kind == _OPEN and self._connect is not None:
            self._start(self._open(number, self._connect))
        elif kind == _DATA and number in self._connections:
            connection = self._connections[number]
            connection.queued += len(data)
            if connection.queued > _MAX_QUEUED:
                self._close(number)
                self._send(_CLOSE, number)
                return
            connection.writer.write(data)
            self._start(self._drained(connection, len(data)))
        elif kind == _CLOSE:
            self._close(number)

    async def _open(self, number: int, connect: Connect) -> None:
        try:
            reader, writer = await connect()
        except OSError:
            self._send(_CLOSE, number)
            return
        self._connections[number] = _Connection(writer)
        await self._pump(number, reader)

    async def _pump(self, number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                self._send(_DATA, number, piece)
        if number in self._connections:
            self._send(_CLOSE, number)
            self._close(number)

    async def _drained(self, connection: _Connection, size: int) -> None:
        with contextlib.suppress(OSError):
            await connection.writer.drain()
        connection.queued -= size

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is not None:
            connection.writer.close()

    async def _beat(self) -> None:
        while True:
            self._send(_BEAT, 0)
            await asyncio.sleep(BEAT_S)

    def _send(self, kind: int, number: int, data: bytes = b"") -> None:
        self._write(_HEAD.pack(kind, number, len(data)) + data)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def feed_from(
    read: Callable[[int], bytes], reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop
) -> threading.Thread:
    """Start a thread that passes on what ``read`` gives, to its end.

    (A pipe of a shell may not be made non-blocking.)
    """

    def work() -> None:
        while True:
            try:
                data = read(_PIECE)
            except (OSError, ValueError):
                data = b""
            with contextlib.suppress(RuntimeError):  # the loop has ended
                if data:
                    loop.call_soon_threadsafe(reader.feed_data, data)
                else:
                    loop.call_soon_threadsafe(reader.feed_eof)
            if not data:
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
