"""The front's end of the sockets: messages from the ranks to callbacks, requests to rank 0."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import zmq

from forebay.engine.api.errors import ApiError
from forebay.engine.ipc.messages import Abort, RpcRequest, RpcResponse, Stop, Submit, WorkerMessage
from forebay.engine.ipc.sockets import Endpoints, Inbox, Outbox

__all__ = ["EngineClient"]


class EngineClient:
    """Bound before any rank starts, so that no rank speaks to nobody; used on the event loop.

    Args:
        endpoints: where to bind.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Inbox[WorkerMessage] = Inbox(self._context, endpoints.to_front, WorkerMessage, bind=True)
        self._outbox = Outbox(self._context, endpoints.to_rank0, bind=True)
        self._on_message: Callable[[WorkerMessage], None] = lambda message: None
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def start(self, on_message: Callable[[WorkerMessage], None]) -> None:
        """Receive from now on; ``on_message`` gets every message but replies to calls, in order."""
        self._on_message = on_message
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self.receive)

    def receive(self) -> None:
        """Take all messages there are. Besides the loop, a slow timer calls this:
        a socket's descriptor only signals edges.
        """
        for message in self._inbox.drain():
            if isinstance(message, RpcResponse):
                self._answer(message)
            else:
                self._on_message(message)

    def submit(self, sequences: list[Submit]) -> None:
        """Hand sequences to the scheduler."""
        for sequence in sequences:
            self._outbox.send(sequence)

    def abort(self, seq_ids: tuple[int, ...]) -> None:
        """Forget sequences."""
        if seq_ids:
            self._outbox.send(Abort(seq_ids))

    async def call(self, method: str, *, tier: str | None = None, timeout_s: float = 30.0) -> dict[str, Any]:
        """Ask rank 0 between two steps.

        Raises:
            TimeoutError: no answer in time.
            ApiError: the worker refused.
        """
        call_id = next(self._call_ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._outbox.send(RpcRequest(call_id, method, tier))
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            del self._calls[call_id]

    def stop(self) -> None:
        """Tell rank 0 to end."""
        self._outbox.send(Stop())

    def close(self) -> None:
        """Close the sockets."""
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._inbox.close()
        self._outbox.close()
        self._context.destroy(linger=0)

    def _answer(self, reply: RpcResponse) -> None:
        future = self._calls.get(reply.call_id)
        if future is None or future.done():
            return  # asked too long ago
        if reply.error is not None:
            future.set_exception(ApiError(reply.error, status=400))
        else:
            future.set_result(reply.result)
