"""A port of a destination as a port of this machine, which comes back by itself after the connection was lost.

Over plain SSH it is a forwarded port of the shared connection (``-L``). A container's own loopback is out of SSH's
reach: there the helper carries the connections (``machine.tcp_relay``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable

from forebay.errors import HostUnreachableError, UsageError
from forebay.machine.interface import BindResult
from forebay.machine.local import LocalMachine, free_local_port
from forebay.machine.tcp_relay import Relay, feed_from
from forebay.remote.agent_session import AgentSession, ConnectionLostError
from forebay.remote.transport import Transport

__all__ = ["PortForward", "open_forward"]

_CHECK_S = 0.5
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 3.0)


def open_forward(
    transport: Transport,
    host: str,
    port: int,
    *,
    local_port: int | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> PortForward:
    """Forward a local port to ``host``:``port`` as seen from the destination.

    Args:
        local_port: which one; None: the same number where it is free, else any free one.
        tell: takes a line when the connection is lost and when it is back.

    Raises:
        HostUnreachableError: the destination cannot be reached.
        UsageError: ``local_port`` is taken.
    """
    chosen = free_local_port(port) if local_port is None else local_port
    if local_port is not None and LocalMachine().try_bind("127.0.0.1", local_port) is not BindResult.FREE:
        raise UsageError(f"port {local_port} is taken on this machine", fix="give another one, or leave it out")
    kind = _RelayForward if transport.destination.containers else _SshForward
    forward = kind(transport, host, port, chosen, tell)
    forward.start()
    return forward


class PortForward:
    """A forwarded port. ``url`` is what a client on this machine uses."""

    def __init__(
        self, transport: Transport, host: str, port: int, local_port: int, tell: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._host = host
        self._port = port
        self._tell = tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self.local_port = local_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.local_port}"

    def start(self) -> None:
        """Open it, and keep it open from now on. Raises HostUnreachableError."""
        self._open()
        self._thread.start()

    def close(self) -> None:
        """Take it back."""
        self._stop.set()
        self._shut()
        self._thread.join(5.0)

    def _open(self) -> None:
        raise NotImplementedError

    def _is_open(self) -> bool:
        raise NotImplementedError

    def _shut(self) -> None:
        raise NotImplementedError

    def _keep(self) -> None:
        lost_at: float | None = None
        attempt = 0
        while not self._stop.wait(_CHECK_S if lost_at is None else _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]):
            if self._is_open():
                continue
            if lost_at is None:
                lost_at, attempt = time.monotonic(), 0
                self._tell(f"{self._transport.name}: the forwarded port {self.local_port} is gone; connecting again")
            try:
                self._open()
            except (HostUnreachableError, ConnectionLostError):
                attempt += 1
                continue
            self._tell(
                f"{self._transport.name}: port {self.local_port} is forwarded again after "
                f"{time.monotonic() - lost_at:.0f} s"
            )
            lost_at = None


class _SshForward(PortForward):
    """``ssh -O forward`` on the shared connection."""

    _master: int | None = None

    def _open(self) -> None:
        assert self._transport.ssh is not None
        self._transport.open()
        self._master = self._transport.ssh.master_pid()
        why = self._transport.ssh.forward(self.local_port, self._host, self._port)
        if why is not None:
            raise HostUnreachableError(
                f"{self._transport.name}: port {self.local_port} cannot be forwarded: {why}",
                fix="AllowTcpForwarding must be on in its sshd_config",
            )

    def _is_open(self) -> bool:
        assert self._transport.ssh is not None
        return self._master is not None and self._transport.ssh.master_pid() == self._master

    def _shut(self) -> None:
        assert self._transport.ssh is not None
        self._transport.ssh.cancel_forward(self.local_port, self._host, self._port)


class _RelayForward(PortForward):
    """Connections carried by the helper; the listening socket stays while the helper is brought back."""

    def __init__(
        self, transport: Transport, host: str, port: int, local_port: int, tell: Callable[[str], None]
    ) -> None:
        super().__init__(transport, host, port, local_port, tell)
        self._loop = asyncio.new_event_loop()
        self._relay: Relay | None = None
        self._session: AgentSession | None = None
        self._server: asyncio.Server | None = None

    def _open(self) -> None:
        if self._server is None:
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        session = AgentSession(self._transport)
        try:
            session.start()
            session.send_request({"do": "relay", "host": self._host, "port": self._port})
        except BaseException:
            session.close()
            raise
        self._session = session
        asyncio.run_coroutine_threadsafe(self._attach(session), self._loop).result(30.0)

    async def _attach(self, session: AgentSession) -> None:
        process = session.streams()
        assert process.stdout is not None
        assert process.stdin is not None
        reader, writes = asyncio.StreamReader(limit=1 << 20), process.stdin

        def write(data: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):
                writes.write(data)
                writes.flush()

        relay = Relay(reader, write, None)
        descriptor = process.stdout.fileno()
        feed_from(lambda size: os.read(descriptor, size), reader, self._loop)
        self._relay = relay
        self._running = asyncio.create_task(self._run(relay))
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.local_port)

    async def _run(self, relay: Relay) -> None:
        await relay.run()
        if self._relay is relay:
            self._relay = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = self._relay
        if relay is None:
            writer.close()  # as a server that is not there
            return
        await relay.accepted(reader, writer)

    def _is_open(self) -> bool:
        return self._relay is not None

    def _shut(self) -> None:
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.close)
        if self._session is not None:
            self._session.close()
