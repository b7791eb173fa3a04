"""A small OpenAI client for timing: token-id prompts in, seconds out."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

__all__ = ["Answer", "complete", "run_streams"]


@dataclass(frozen=True)
class Answer:
    """One completion: seconds to the first token and to the end, and the server's own usage."""

    first_s: float
    total_s: float
    output_tokens: int
    usage: dict[str, Any]


async def complete(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], max_tokens: int, extra: dict[str, Any]
) -> Answer:
    """Stream one completion of exactly ``max_tokens`` tokens (``ignore_eos``) and time it.

    Raises:
        RuntimeError: the server refused, or its own usage does not show ``max_tokens`` tokens.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    start, first, usage = time.perf_counter(), 0.0, {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            first = first or time.perf_counter() - start
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            usage = event.get("usage") or usage
    tokens = int(usage.get("completion_tokens", 0))
    if tokens != max_tokens:
        raise RuntimeError(f"{url}: asked for {max_tokens} tokens, usage says {tokens}")
    return Answer(first, time.perf_counter() - start, tokens, usage)


async def run_streams(
    url: str, model: str, prompts: list[list[int]], max_tokens: int, extra: dict[str, Any]
) -> tuple[float, list[Answer]]:
    """All prompts at once; returns (wall seconds, answers)."""
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        answers = await asyncio.gather(*(complete(session, url, model, p, max_tokens, extra) for p in prompts))
        return time.perf_counter() - start, list(answers)
