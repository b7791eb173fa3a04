"""The API server's end of the sockets: messages from the ranks to a callback, requests to rank 0."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from forebay.engine.api.errors import ApiError
from forebay.engine.ipc.messages import Abort, RpcRequest, RpcResponse, Stop, Submit, WorkerMessage
from forebay.engine.ipc.sockets import Endpoints, Outbox

__all__ = ["EngineClient"]


class EngineClient:
    """Bound before any rank starts, so that no message is lost; used on the event loop.

    Args:
        endpoints: where to bind.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(endpoints.to_front)
        self._decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
        self._outbox = Outbox(self._context, endpoints.to_rank0, bind=True)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def receive(self, on_message: Callable[[WorkerMessage], None]) -> None:
        """Receive until cancelled; ``on_message`` gets every message but replies to calls, in order."""
        with zmq.asyncio.Socket.from_socket(self._inbox) as inbox:
            while True:
                message = self._decoder.decode(await inbox.recv())
                if isinstance(message, RpcResponse):
                    self._answer(message)
                else:
                    on_message(message)

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
        self._inbox.close(linger=0)
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
