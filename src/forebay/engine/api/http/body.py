"""A request's body: counted while it is read, and read only for so long."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import ClientDisconnect, Request

from forebay.engine.api.errors import ApiError
from forebay.engine.api.http.limits import ConnectionLimits

__all__ = ["read_body"]


async def read_body(request: Request, limits: ConnectionLimits) -> bytes:
    """The whole body. Notes in the request's scope that nothing more of it will come (``body_complete``).

    Raises:
        ApiError: 413 above the limit, 408 where it comes too slowly; either ends the connection.
        ClientDisconnect: the client is gone.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limits.max_body_bytes:
        raise _too_large(limits)
    began = time.monotonic()
    chunks: list[bytes] = []
    received = 0
    while True:
        try:
            async with asyncio.timeout(limits.body_deadline_s(received) - (time.monotonic() - began)):
                message = await request.receive()
        except TimeoutError as error:
            text = f"The request's body came too slowly: {received} bytes in {time.monotonic() - began:.0f} s."
            raise ApiError(text, status=408, closes=True) from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        received += len(chunks[-1])
        if received > limits.max_body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            request.scope["body_complete"] = True
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limits: ConnectionLimits) -> ApiError:
    return ApiError(f"The body is larger than {limits.max_body_bytes} bytes.", status=413, closes=True)
