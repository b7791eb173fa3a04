"""A null server: the OpenAI API with no model behind it, on bare asyncio, for tests and for measuring clients.

An answer is a function of the request's messages alone, so a lost, doubled or reordered turn shows in the output.
Optional: delays, bounded slots (throughput stops rising), 429s, dropped connections, a prefix cache that reports its
hits per tier and can be flushed.

    python -m benchmarks.null_server --port 18400 --tokens 8 --token-s 0.001 --slots 32 --cache-blocks 100000
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WORDS = [
    "water",
    "wheel",
    "basin",
    "river",
    "stone",
    "gate",
    "level",
    "flow",
    "spring",
    "turbine",
    "channel",
    "bank",
    "reed",
    "mill",
    "pond",
    "weir",
]
_BLOCK_CHARS = 64  # characters of prompt in one cached block: 16 tokens of 4 characters


def answer_text(messages: Any, tokens: int, seed: int | None = None) -> str:
    """The null model: ``tokens`` words drawn from a hash of the messages."""
    digest = hashlib.blake2b(json.dumps([messages, seed]).encode(), digest_size=32).digest()
    words = [WORDS[digest[i % 32] % len(WORDS)] for i in range(max(tokens - 1, 0))]
    return " ".join([*words, digest[:4].hex()])


@dataclass(slots=True)
class Options:
    """How the server behaves."""

    port: int = 0
    model: str = "null"
    tokens: int = 8  # answer length when max_tokens is larger
    first_s: float = 0.0  # before the first token
    token_s: float = 0.0  # a token
    prompt_token_s: float = 0.0  # a prompt token that is not cached
    slots: int = 0  # answers in work at once; 0: no bound
    queue: int = 0  # answers in work and waiting before 429; 0: no bound
    retry_after: str = "0.2"
    drop: float = 0.0  # share of answers whose connection is cut half-way
    cache_blocks: int = 0  # prompt blocks remembered; 0: none, and usage says nothing about caching
    flushable: bool = True
    seed: int = 0


@dataclass(slots=True)
class State:
    """What is counted and kept."""

    options: Options
    in_work: int = 0
    slots: asyncio.Semaphore | None = None
    first_s: float = 0.0  # when the first request came and the last answer went, on the loop's clock
    last_s: float = 0.0
    requests: int = 0
    refused: int = 0
    most_in_work: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    random: random.Random = field(default_factory=random.Random)


class _Connection(asyncio.Protocol):
    """One keep-alive connection; requests are answered one after the other."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def _next(self) -> None:
        if self._task is not None and not self._task.done():
            return
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[:head_end]
        length = 0
        at = head.lower().find(b"content-length:")
        if at >= 0:
            length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        if len(self._buffer) < head_end + 4 + length:
            return
        body = self._buffer[head_end + 4 : head_end + 4 + length]
        self._buffer = self._buffer[head_end + 4 + length :]
        method, path, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if method == b"POST" and path.startswith(b"/v1/"):
            self._generate(path, json.loads(body))
        else:
            self._control(method, path.split(b"?", 1)[0])
            self._next()

    def _control(self, method: bytes, path: bytes) -> None:
        state = self._state
        if path == b"/health":
            self._send(200, {"status": "ok"})
        elif path == b"/v1/models":
            self._send(200, {"object": "list", "data": [{"id": state.options.model, "object": "model"}]})
        elif path == b"/flush_cache" and method == b"POST" and state.options.flushable:
            state.blocks.clear()
            self._send(200, {"flushed": True})
        elif path == b"/null/stats":
            names = (
                "first_s",
                "last_s",
                "requests",
                "refused",
                "most_in_work",
                "in_work",
                "cached_tokens",
                "prompt_tokens",
                "output_tokens",
            )
            self._send(200, {name: getattr(state, name) for name in names})
        else:
            self._send(404, {"error": "no such path"})

    def _generate(self, path: bytes, body: dict[str, Any]) -> None:
        state, options = self._state, self._state.options
        if options.queue and state.in_work >= options.queue:
            state.refused += 1
            self._send(429, {"error": "queue full"}, f"Retry-After: {options.retry_after}\r\n".encode())
            return
        if body.get("messages") and body["messages"][-1]["content"] == "refuse me":
            self._send(400, {"error": "refused, as asked"})
            return
        if self._asked(body) > 1:  # a probe of one token is no part of a load
            state.first_s = state.first_s or time.monotonic()
        state.in_work += 1
        state.most_in_work = max(state.most_in_work, state.in_work)
        plain = not (options.first_s or options.token_s or options.prompt_token_s or state.slots or options.drop)
        if plain and not body.get("stream"):
            self._finish(path, body, self._usage(body))
            return
        self._task = asyncio.create_task(self._slowly(path, body))
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and self._transport is not None:
            self._transport.abort()
            task.result()  # a bug of this server: say so
        self._next()

    async def _slowly(self, path: bytes, body: dict[str, Any]) -> None:
        state, options = self._state, self._state.options
        counted = True
        try:
            if state.slots is not None:
                await state.slots.acquire()
            try:
                usage = self._usage(body)
                fresh = usage["prompt_tokens"] - usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
                await asyncio.sleep(options.first_s + options.prompt_token_s * fresh)
                cut = self._asked(body) != 1 and state.random.random() < options.drop  # probes of one token go through
                if cut and self._transport is not None:
                    self._transport.abort()
                    return
                if body.get("stream"):
                    await self._stream(path, body, usage)
                else:
                    await asyncio.sleep(options.token_s * usage["completion_tokens"])
                    counted = False
                    self._finish(path, body, usage)
            finally:
                if state.slots is not None:
                    state.slots.release()
        finally:
            if counted:
                state.in_work -= 1

    def _prompt(self, body: dict[str, Any]) -> Any:
        return body["messages"] if "messages" in body else body.get("prompt")

    def _asked(self, body: dict[str, Any]) -> int:
        return body.get("max_tokens") or body.get("max_completion_tokens") or 16

    def _length(self, body: dict[str, Any]) -> int:
        asked = self._asked(body)
        return asked if body.get("ignore_eos") else min(self._state.options.tokens, asked)

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        prompt = self._prompt(body)
        text = json.dumps(prompt)
        tokens = (
            len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else len(text) // 4 + 1
        )
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": self._length(body)}
        usage["total_tokens"] = tokens + usage["completion_tokens"]
        if state.options.cache_blocks:
            cached = min(self._look_up(text, tokens), tokens - 1)
            usage["prompt_tokens_details"] = {
                "cached_tokens": cached,
                "cached_tokens_details": {"device": cached, "host": 0, "disk": 0},
            }
            state.cached_tokens += cached
        state.prompt_tokens += tokens
        state.output_tokens += usage["completion_tokens"]
        return usage

    def _look_up(self, text: str, tokens: int) -> int:
        """Cached tokens of a prompt; afterwards its blocks are cached, the least recently used ones forgotten."""
        state, hashed = self._state, b""
        hit_chars, missed = 0, False
        for start in range(0, len(text) - _BLOCK_CHARS + 1, _BLOCK_CHARS):
            hashed = hashlib.blake2b(hashed + text[start : start + _BLOCK_CHARS].encode(), digest_size=8).digest()
            missed = missed or hashed not in state.blocks
            hit_chars += 0 if missed else _BLOCK_CHARS
            state.blocks[hashed] = None
            state.blocks.move_to_end(hashed)
        while len(state.blocks) > state.options.cache_blocks:
            state.blocks.popitem(last=False)
        return hit_chars * tokens // max(len(text), 1)

    def _finish(self, path: bytes, body: dict[str, Any], usage: dict[str, Any]) -> None:
        state = self._state
        state.in_work -= 1
        state.requests += 1
        state.last_s = time.monotonic()
        text = answer_text(self._prompt(body), usage["completion_tokens"], body.get("seed"))
        reason = "length" if usage["completion_tokens"] >= self._asked(body) else "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if path.startswith(b"/v1/chat"):
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        self._send(200, {"object": "chat.completion", "choices": [choice], "usage": usage})

    async def _stream(self, path: bytes, body: dict[str, Any], usage: dict[str, Any]) -> None:
        chat = path.startswith(b"/v1/chat")
        words = answer_text(self._prompt(body), usage["completion_tokens"], body.get("seed")).split(" ")
        self._write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        loop = asyncio.get_running_loop()
        due = loop.time()
        for number, word in enumerate(words):
            text = word if number == 0 else " " + word
            delta = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
            self._event({"choices": [delta]})
            due += self._state.options.token_s
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
        last = {"index": 0, "finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}
        self._event({"choices": [last]})
        self._event({"choices": [], "usage": usage})
        self._write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self._state.requests += 1
        self._state.last_s = time.monotonic()

    def _event(self, value: dict[str, Any]) -> None:
        kind = "text_completion" if "text" in (value["choices"] or [{}])[0] else "chat.completion.chunk"
        data = (
            b"data: "
            + json.dumps({"id": "null", "object": kind, "created": 0, "model": "null", **value}).encode()
            + b"\n\n"
        )
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def _send(self, status: int, value: dict[str, Any], more: bytes = b"") -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n" % (
            status,
            len(body),
            more,
        )
        self._write(head + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def start(options: Options) -> tuple[asyncio.Server, State]:
    """Listen; returns the server and its counts. Port 0 takes a free one: ``server.sockets[0].getsockname()``."""
    state = State(options, random=random.Random(options.seed))
    if options.slots:
        state.slots = asyncio.Semaphore(options.slots)
    factory: Callable[[], _Connection] = lambda: _Connection(state)  # noqa: E731
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", options.port, backlog=4096)
    return server, state


async def _serve(options: Options) -> None:
    server, _ = await start(options)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(f"null server on {server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()


def main() -> None:
    """Parse the options and serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in _option_defaults().items():
        kind = type(default)
        parser.add_argument(
            "--" + name.replace("_", "-"), default=default, type=(lambda t: t == "1") if kind is bool else kind
        )
    asyncio.run(_serve(Options(**vars(parser.parse_args()))))


def _option_defaults() -> dict[str, Any]:
    fresh = Options()
    return {name: getattr(fresh, name) for name in Options.__dataclass_fields__}


if __name__ == "__main__":
    main()
