"""One server over HTTP: whole answers for ``generate``, timed streams for ``bench``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forebay.workload.answers import CompletionAnswer, ReportedUsage, decode_answer, decode_chunk
from forebay.workload.connections import Connections, HttpReply
from forebay.workload.failures import FailureKind, RequestFailure, kind_of_status

__all__ = ["Client", "Streamed"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_MAX_MESSAGE = 300
_ENCODER = msgspec.json.Encoder()


@dataclass(slots=True)
class Streamed:
    """One streamed answer with its times (``time.perf_counter`` seconds).

    ``token_times`` has one entry for each event with text; the first is the time of the first token.
    """

    started: float
    finished: float = 0.0
    token_times: list[float] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: ReportedUsage | None = None


class Client:
    """Requests to one server; close it when done.

    Args:
        url: the server's root, without ``/v1``.
        api_key: sent as a bearer token when given; never logged.
        read_timeout_s: longest time without a byte on an open request.
    """

    def __init__(self, url: str, *, api_key: str | None = None, read_timeout_s: float = 1800.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = Connections(self.url, headers=headers, read_timeout_s=read_timeout_s)

    async def close(self) -> None:
        """Close every connection."""
        self._connections.close()

    async def chat(self, body: Mapping[str, Any], *, path: str = CHAT) -> CompletionAnswer:
        """Send one request and read the whole answer.

        Raises:
            RequestFailure: no answer; ``kind`` is the cause.
        """
        reply = await self._connections.request("POST", path, _ENCODER.encode(body))
        if reply.status != 200:
            raise _failure_of(reply)
        try:
            return decode_answer(reply.body)
        except ValueError as error:
            raise RequestFailure(FailureKind.BAD_ANSWER, f"{error}: {_short(reply.body)}", status=200) from error

    async def stream(self, body: Mapping[str, Any], *, path: str = CHAT) -> Streamed:
        """Send one streaming request and record when each event with text arrives.

        Raises:
            RequestFailure: no answer, or an incomplete one.
        """
        encoded = _ENCODER.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        events = _Events(Streamed(started=time.perf_counter()))
        reply = await self._connections.request("POST", path, encoded, events.take)
        result = events.result
        result.finished = time.perf_counter()
        if reply.status != 200:
            raise _failure_of(reply)
        if not events.ended and result.finish_reason is None:
            raise RequestFailure(FailureKind.BROKEN, "the stream ended without a finish reason")
        return result

    async def get(self, path: str, *, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """GET a small resource: status and body.

        Raises:
            RequestFailure: nothing answered.
        """
        return await self._small("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> tuple[int, bytes]:
        """POST to a control endpoint: status and body.

        Raises:
            RequestFailure: nothing answered.
        """
        return await self._small("POST", path, _ENCODER.encode(body) if body is not None else None, timeout_s)

    async def _small(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._connections.request(method, path, body)
        except TimeoutError as error:
            raise RequestFailure(FailureKind.TIMEOUT, f"no answer within {timeout_s:g} s") from error
        return reply.status, reply.body


class _Events:
    """Reads server-sent events from the pieces of a body, which may end anywhere."""

    def __init__(self, result: Streamed) -> None:
        self.result = result
        self.ended = False
        self._pending = b""

    def take(self, piece: bytes, now: float) -> None:
        """Read one piece that arrived at ``now``."""
        *lines, self._pending = (self._pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.ended = _take_event(self.result, line[5:].strip(), now) or self.ended


def _take_event(result: Streamed, data: bytes, now: float) -> bool:
    """Add one ``data:`` payload to the result; True for the end marker."""
    if data == b"[DONE]":
        return True
    try:
        chunk = decode_chunk(data)
    except ValueError as error:
        raise RequestFailure(FailureKind.BAD_ANSWER, f"{error}: {_short(data)}", status=200) from error
    if chunk.error is not None:
        raise RequestFailure(FailureKind.SERVER_ERROR, f"in the stream: {chunk.error}", status=200)
    if chunk.text:
        result.token_times.append(now)
        result.text_parts.append(chunk.text)
    if chunk.finish_reason is not None:
        result.finish_reason = chunk.finish_reason
    if chunk.usage is not None:
        result.usage = chunk.usage
    return False


def _failure_of(reply: HttpReply) -> RequestFailure:
    return RequestFailure(
        kind_of_status(reply.status),
        f"HTTP {reply.status}: {_short(reply.body)}",
        status=reply.status,
        retry_after_s=_seconds(reply.retry_after),
    )


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; the HTTP-date form is not used by inference servers and counts as absent."""
    try:
        value = float(retry_after) if retry_after is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < 86400 else None


def _short(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"
