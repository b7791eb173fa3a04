"""ZeroMQ over a private folder: where the sockets are, and typed sending and receiving.

The folder holds Unix sockets and is readable by this user only. A connected socket needs its name no more, so the
front removes the folder as soon as every rank has said Hello; until then a rank that outlives the front removes it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from forebay.engine.runtime.messages import Followed, FrontMessage, PlanMessage, WorkerMessage

__all__ = ["Endpoints", "Inbox", "Outbox"]

Message = TypeVar("Message")


class Endpoints(msgspec.Struct, frozen=True):
    """The addresses of one server's sockets, all under ``folder``."""

    folder: str

    @classmethod
    def create(cls) -> Endpoints:
        """Make the folder (mode 0700)."""
        return cls(tempfile.mkdtemp(prefix="forebay-ipc-"))

    def remove(self) -> None:
        """Remove the folder; safe to call twice."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def to_front(self) -> str:
        """Bound by the front; every rank's WorkerMessages."""
        return self._address("front")

    @property
    def to_rank0(self) -> str:
        """Bound by the front; FrontMessages."""
        return self._address("rank0")

    def plan(self, rank: int) -> str:
        """Bound by ``rank`` (1 or more); rank 0's PlanMessages for it."""
        return self._address(f"plan{rank}")

    @property
    def followed(self) -> str:
        """Bound by rank 0; the other ranks' Followed."""
        return self._address("followed")

    def _address(self, name: str) -> str:
        return f"ipc://{Path(self.folder) / name}"


class Outbox:
    """Sends messages from one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool = False) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=str)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def send(self, message: FrontMessage | WorkerMessage | PlanMessage | Followed) -> None:
        """Queue ``message``; never blocks: there is no high-water mark (senders are bounded by the request queue), and
        where a bound socket has no peer any more, the message is dropped: whoever it was for is dead."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued (half a second at most) and close."""
        self._socket.close()


class Inbox(Generic[Message]):
    """Receives messages of one union type on one thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, kind: object, *, bind: bool = False
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def fileno(self) -> int:
        """A descriptor that signals when there may be messages; drain until empty each time it does."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self, wait_s: float | None = 0.0) -> list[Message]:
        """All messages there are; waits up to ``wait_s`` (None: forever) for the first one."""
        timeout = None if wait_s is None else int(wait_s * 1000)
        if timeout != 0 and not self._socket.poll(timeout):
            return []
        messages: list[Message] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self._socket.close(linger=0)
