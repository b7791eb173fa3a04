"""Sends a generation to its client, whole or as server-sent events, and notices when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.engine.api.errors import ApiError
from forebay.engine.api.generation import Delta, Generation
from forebay.engine.api.http.json_response import JSON, send_json
from forebay.engine.api.openai.responses import AnswerFormat

__all__ = ["GenerationResponse"]

_DONE = b"data: [DONE]\n\n"


class GenerationResponse(Response):
    """An answer that is made while it is sent.

    Args:
        generation: already submitted.
        format: its JSON shapes.
        stream: server-sent events, or one JSON document.
        include_usage: a stream ends with a usage chunk.
        echoes: per choice, text that goes before its own.
        on_end: called once with the generation when all is over, also after a hang-up.
    """

    def __init__(
        self,
        generation: Generation,
        format: AnswerFormat,
        *,
        stream: bool,
        include_usage: bool,
        echoes: list[str],
        on_end: Callable[[Generation], None],
    ) -> None:
        super().__init__(status_code=200)
        self._generation = generation
        self._format = format
        self._stream = stream
        self._include_usage = include_usage
        self._echoes = echoes
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_stream(send) if self._stream else self._send_whole(send))
        finally:
            watcher.cancel()
            self._on_end(self._generation)

    async def _watch(self, receive: Receive) -> None:
        """Cancel the generation when the client closes its connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.cancel()

    async def _send_whole(self, send: Send) -> None:
        whole = [Delta(index, echo) for index, echo in enumerate(self._echoes)]
        try:
            while deltas := await self._generation.next_deltas():
                for delta in deltas:
                    whole[delta.index].add(delta)
        except ApiError as error:
            await send_json(send, error.status, error.body(), error.headers())
            return
        if not self._generation.is_cancelled:
            await send_json(send, 200, self._format.whole(whole, self._generation.usage), {})

    async def _send_stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opened: set[int] = set()
        try:
            while deltas := await self._generation.next_deltas():
                body = b"".join(self._chunks(delta, opened) for delta in deltas)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            tail = _event(self._format.usage_chunk(self._generation.usage)) if self._include_usage else b""
            tail += _DONE
        except ApiError as error:
            tail = _event(error.body())
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _chunks(self, delta: Delta, opened: set[int]) -> bytes:
        """The events of one delta; one without news (text held back) makes none."""
        body = b""
        if delta.index not in opened:
            opened.add(delta.index)
            opening = self._format.opening(delta.index)
            body += b"" if opening is None else _event(opening)
            delta.text = self._echoes[delta.index] + delta.text
        if delta.text or delta.logprobs or delta.finish or self._format.wants_tokens:
            body += _event(self._format.chunk(delta))
        return body


def _event(data: object) -> bytes:
    return b"data: " + JSON.encode(data) + b"\n\n"
