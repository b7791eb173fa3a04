"""One server over HTTP: whole answers for ``generate``, timed streams for ``bench``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from forebay.workload.answers import Answer, Usage, decode_answer, decode_chunk
from forebay.workload.failures import FailureKind, RequestFailure, kind_of_status

__all__ = ["Client", "Streamed"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_JSON = {"Content-Type": "application/json"}
_LONGEST_MESSAGE = 300


@dataclass(slots=True)
class Streamed:
    """One streamed answer with its times (``time.perf_counter`` seconds).

    ``token_times`` has one entry for each event that carried text: the first is the first token's.
    """

    started: float
    finished: float = 0.0
    token_times: list[float] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None


class Client:
    """Requests to one server. One instance a server; close it when done.

    Args:
        url: the server's root, without ``/v1``.
        api_key: sent as a bearer token when given; never logged.
        read_timeout_s: longest silence on an open request.
    """

    def __init__(self, url: str, *, api_key: str | None = None, read_timeout_s: float = 1800.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, force_close=False),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=read_timeout_s),
            headers=headers,
            auto_decompress=True,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def chat(self, body: Mapping[str, Any], *, path: str = CHAT) -> Answer:
        """Send one request and read the whole answer.

        Raises:
            RequestFailure: no answer; ``kind`` says why.
        """
        async with self._post(path, body) as response:
            raw = await response.read()
        try:
            return decode_answer(raw)
        except ValueError as error:
            raise RequestFailure(FailureKind.BAD_ANSWER, f"{error}: {_short(raw)}", status=200) from error

    async def stream(self, body: Mapping[str, Any], *, path: str = CHAT) -> Streamed:
        """Send one streaming request and note when each event with text arrives.

        Raises:
            RequestFailure: no answer, or one that stopped half-way.
        """
        clock = time.perf_counter
        result = Streamed(started=clock())
        pending = b""
        ended = False
        async with self._post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
            async for piece in response.content.iter_any():
                now = clock()
                pending += piece
                *events, pending = pending.split(b"\n")
                for line in events:
                    if line.startswith(b"data:"):
                        ended = _take_event(result, line[5:].strip(), now) or ended
        result.finished = clock()
        if not ended and result.finish_reason is None:
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
        return await self._small("POST", path, body, timeout_s)

    async def _small(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        data = msgspec.json.encode(body) if body is not None else None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with _translated():
            async with self._session.request(
                method, self.url + path, data=data, headers=_JSON if data else None, timeout=timeout
            ) as response:
                return response.status, await response.read()

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        with _translated():
            async with self._session.post(self.url + path, data=msgspec.json.encode(body), headers=_JSON) as response:
                if response.status != 200:
                    raise _failure_of(response.status, await response.read(), response.headers.get("Retry-After"))
                yield response


class _translated:
    """The one border where the HTTP library's errors become ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, RequestFailure):
            return
        if isinstance(error, aiohttp.ClientConnectorError):
            raise RequestFailure(FailureKind.CONNECT, str(error)) from error
        if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
            raise RequestFailure(FailureKind.TIMEOUT, "no byte for the read timeout") from error
        if isinstance(error, (aiohttp.ClientError, ConnectionError, OSError)):
            raise RequestFailure(FailureKind.BROKEN, str(error) or type(error).__name__) from error


def _take_event(result: Streamed, data: bytes, now: float) -> bool:
    """Add one ``data:`` payload to the result; True when it was the end marker."""
    if data == b"[DONE]":
        return True
    try:
        chunk = decode_chunk(data)
    except ValueError as error:
        raise RequestFailure(FailureKind.BAD_ANSWER, f"{error}: {_short(data)}", status=200) from error
    if chunk.text:
        result.token_times.append(now)
        result.text_parts.append(chunk.text)
    if chunk.finish_reason is not None:
        result.finish_reason = chunk.finish_reason
    if chunk.usage is not None:
        result.usage = chunk.usage
    return False


def _failure_of(status: int, body: bytes, retry_after: str | None) -> RequestFailure:
    return RequestFailure(
        kind_of_status(status), f"HTTP {status}: {_short(body)}", status=status, retry_after_s=_seconds(retry_after)
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
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"
