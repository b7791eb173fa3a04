"""The HTTP server: uvicorn on a socket that is already open."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from forebay.engine.api.http.connection import connection_class
from forebay.engine.api.http.limits import ConnectionLimits

__all__ = ["HttpServer"]

_GRACE_S = 2
"""Answers that are being sent when the server ends may take this long."""


class HttpServer(uvicorn.Server):
    """Serves an application until it is told to stop.

    Args:
        app: the application.
        limits: of every connection.
        on_signal: called on the event loop with SIGINT or SIGTERM, each time one comes.
    """

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, on_signal: Callable[[signal.Signals], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(limits),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=max(1, round(limits.timeout_s)),
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
            )
        )
        self._on_signal = on_signal
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on ``sockets`` until ``should_exit`` is set; then end the connections and close them."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; what it means is decided elsewhere."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig))
