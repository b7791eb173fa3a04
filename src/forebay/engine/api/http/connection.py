"""One client's connection: uvicorn's HTTP protocol with limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forebay.engine.api.errors import ApiError
from forebay.engine.api.http.json_response import raw_response
from forebay.engine.api.http.limits import ConnectionLimits

__all__ = ["connection_class"]


def connection_class(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """A protocol class for ``uvicorn.Config(http=...)`` whose connections keep to ``limits``."""

    class Connection(_LimitedConnection):
        _limits = limits

    return Connection


class _LimitedConnection(HttpToolsProtocol):
    """Ends a connection whose client sends a head too slowly or one too large, or does not read its answer.

    uvicorn's own timer ends idle connections. Request bodies are counted and timed where they are read
    (``http/body.py``); here only what surrounds them (chunk sizes, trailers) is bounded.
    """

    _limits: ConnectionLimits

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._is_in_head = True
        self._received = 0
        """Bytes of the current request so far."""

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(ApiError("The server has too many connections.", status=503, retry_after_s=1))
        else:
            self._start_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received += len(data)
        if self._head_timer is None and self._is_in_head and self._is_idle:
            self._start_head()
        super().data_received(data)
        limits = self._limits
        if self._is_in_head and self._received > limits.max_head_bytes:
            self._refuse(ApiError(f"The request's head has more than {limits.max_head_bytes} bytes.", status=431))
        elif self._received > limits.max_head_bytes + 2 * limits.max_body_bytes:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head()
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._limits.timeout_s, self._on_unread)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    # -- httptools' callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._start_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_head()
        self._is_in_head = True
        self._received = 0

    def on_response_complete(self) -> None:
        """Answered. A client that still sends its body (it was refused), or has not read its answer, gets a moment
        for that.
        """
        super().on_response_complete()
        if self.transport.is_closing():
            self.loop.call_later(self._limits.timeout_s, self.transport.abort)
        elif not self._is_in_head:
            self._start_head()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for long; what the client has not read by now it never will."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    # -- the limits -----------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_head(self) -> None:
        self._stop_head()
        self._head_timer = self.loop.call_later(self._limits.timeout_s, self._on_slow_head)

    def _stop_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        if not self._is_in_head:
            self.transport.abort()  # answered long ago, and the body still comes
            return
        self._refuse(ApiError(f"The request's head did not come within {self._limits.timeout_s:g} s.", status=408))

    def _stop_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_unread(self) -> None:
        """The client has left a part of its answer unread: end the connection, unless it has read some of it."""
        left = self.transport.get_write_buffer_size()
        if left >= self._unread:
            self.transport.abort()
            return
        self._unread = left
        self._unread_timer = self.loop.call_later(self._limits.timeout_s, self._on_unread)

    def _refuse(self, error: ApiError) -> None:
        """Answer before any handler has the request, and close."""
        self._stop_head()
        if self._is_idle:
            self.transport.write(raw_response(error))
            self.transport.close()
        else:
            self.transport.abort()  # an earlier answer is still being sent on this connection
