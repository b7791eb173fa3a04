"""ZeroMQ over a private folder: where the sockets are, and typed sending and receiving.

The folder holds Unix sockets and is readable by this user only. A connected socket needs its name no more, so the
front removes the folder as soon as the server is ready; until then a rank that outlives the front removes it. Where all
were killed at once while starting, the next server does: the front holds a lock on its folder for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from forebay.engine.ipc.messages import FrontMessage, PlanMessage, StepAck, WorkerMessage

__all__ = ["Endpoints", "Inbox", "Outbox", "encode"]

AnyMessage = FrontMessage | WorkerMessage | PlanMessage | StepAck
Message = TypeVar("Message")
_PREFIX = "forebay-ipc-"
_LOCK = "lock"
_LONGEST_PARENT = 70
"""A Unix socket's path may have 107 bytes (sun_path in linux/un.h)."""
_YOUNG_S = 60.0
"""A folder may not have its lock yet."""


class Endpoints(msgspec.Struct, frozen=True):
    """The addresses of one server's sockets, all under ``folder``."""

    folder: str

    @classmethod
    def create(cls) -> Endpoints:
        """Make the folder (mode 0700), lock it for the life of this process, and remove what dead servers left."""
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _LONGEST_PARENT:
            parent = Path("/tmp")
        for old in parent.glob(_PREFIX + "*"):
            _remove_if_dead(old)
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        lock = os.open(Path(folder) / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)  # the descriptor stays open on purpose
        return cls(folder)

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


def _remove_if_dead(folder: Path) -> None:
    """Remove a folder of ours whose server is gone."""
    try:
        if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _YOUNG_S:
            return
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # gone meanwhile
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # its server lives
    finally:
        os.close(lock)


_encoder = msgspec.msgpack.Encoder(enc_hook=str)


def encode(message: AnyMessage) -> bytes:
    """A message as it goes over a socket; a message for several receivers is encoded once."""
    return _encoder.encode(message)


class Outbox:
    """Sends messages from one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool = False) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def send(self, message: AnyMessage) -> None:
        """Queue ``message``; see ``send_encoded``."""
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Queue a message that ``encode`` made. Never blocks: there is no high-water mark (the request queue bounds the
        senders), and where a bound socket has lost its peer, the message is dropped, because its receiver is dead."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)

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
