"""JSON answers."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.engine.api.errors import ApiError

__all__ = ["JSON", "ClosingError", "JSONBody", "raw_response", "send_json"]

JSON = msgspec.json.Encoder()


class JSONBody(Response):
    """A JSON answer."""

    media_type = "application/json"

    def __init__(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(JSON.encode(data), status, headers)


class ClosingError(Response):
    """An error that ends its connection while the client may still be sending its body.

    What comes is read and dropped for a moment before the connection is closed: closing at once would make the kernel
    reset it, and the client would see that instead of the answer.
    """

    _LINGER_S = 2.0

    def __init__(self, data: Any, status: int, headers: dict[str, str]) -> None:
        super().__init__(
            JSON.encode(data), status, {**headers, "content-type": "application/json", "connection": "close"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if not scope.get("body_complete"):
            await self._drop_the_rest(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drop_the_rest(self, receive: Receive) -> None:
        try:
            async with asyncio.timeout(self._LINGER_S):
                while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                    pass
        except TimeoutError:
            pass


async def send_json(send: Send, status: int, data: object, headers: dict[str, str]) -> None:
    """A whole JSON answer over ASGI."""
    body = JSON.encode(data)
    pairs = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    pairs += [(key.encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def raw_response(error: ApiError) -> bytes:
    """An error as the bytes of a response that ends its connection, for where no request was understood."""
    body = JSON.encode(error.body())
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in error.headers().items()),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
