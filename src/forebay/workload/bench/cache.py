"""Bring the server's cache into the state asked for before a run, and check that it is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.errors import NotInEffectError
from forebay.workload.bench.prompts import PromptGenerator
from forebay.workload.bench.settings import CacheTemperature
from forebay.workload.client import Client
from forebay.workload.counters import difference, read_hits
from forebay.workload.failures import RequestFailure
from forebay.workload.target import ServerIdentity

__all__ = ["CacheRecord", "flush_and_check"]

_FLUSHES = ("/flush_cache", "/reset_prefix_cache")  # embedded and SGLang; vLLM in development mode
_PROBE_TOKENS = 640  # more than one page of each known server


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """The state of the cache when a run began. ``seen`` is False where it could not be observed."""

    state: CacheTemperature
    seen: bool
    evidence: str


async def flush_and_check(client: Client, server: ServerIdentity, generator: PromptGenerator) -> CacheRecord:
    """Flush every tier, and check that a prompt that hit before the flush misses after it.

    Raises:
        NotInEffectError: the server cannot flush, or the probe still hits after it did.
    """
    body = _probe(server.model, generator)
    await _cached_tokens(client, server, body)
    before = await _cached_tokens(client, server, body)
    path = await _flush(client)
    after = await _cached_tokens(client, server, body)
    if before is None or after is None:
        return CacheRecord(
            CacheTemperature.COLD, False, f"POST {path} answered 200; the server reports no cached tokens to see it by"
        )
    if not before:
        return CacheRecord(
            CacheTemperature.COLD, False, f"POST {path} answered 200; the probe never hit, so its cache may be off"
        )
    if after:
        raise NotInEffectError(
            f"cold: after POST {path} the probe still had {after} cached tokens (of {before} before)",
            fix="stop the other requests of this server, or use --cache as-is",
        )
    return CacheRecord(CacheTemperature.COLD, True, f"probe: {before} cached tokens before POST {path}, 0 after")


async def _flush(client: Client) -> str:
    said = []
    for path in _FLUSHES:
        try:
            status, answer = await client.post(path)
        except RequestFailure as failure:
            said.append(f"{path}: {failure.message}")
            continue
        if 200 <= status < 300:
            return path
        said.append(f"{path}: {status} {answer[:80].decode('utf-8', 'replace').strip()}")
    raise NotInEffectError(
        f"cold: {client.url} cannot flush its cache ({'; '.join(said)})",
        fix="use --cache as-is: prompts are new in every run, so nothing of them is cached "
        "(vLLM flushes with VLLM_SERVER_DEV_MODE=1)",
    )


def _probe(model: str, generator: PromptGenerator) -> dict[str, Any]:
    text = (
        generator.with_salt(generator.salt + " probe").text("is it flushed", _PROBE_TOKENS)
        if generator.highest_id is None
        else ""
    )
    if not text:
        text = PromptGenerator(generator.salt + " probe", None).text("is it flushed", _PROBE_TOKENS)
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}


async def _cached_tokens(client: Client, server: ServerIdentity, body: dict[str, Any]) -> int | None:
    """Cached tokens of one request: from its usage, else from the counters; None when neither reports them."""
    first = await read_hits(client, server.kind)
    answer = await client.chat(body)
    if answer.usage is not None and answer.usage.cached_tokens is not None:
        return answer.usage.cached_tokens
    moved = difference(first, await read_hits(client, server.kind))
    return None if moved is None else sum(moved.values())
