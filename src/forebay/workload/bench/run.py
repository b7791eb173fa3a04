"""One measured run: who answers, the cache's state, the load, the counters, the result."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from forebay.errors import DeadError, NotInEffectError, UsageError
from forebay.workload.bench.cache import CacheRecord, flush_seen
from forebay.workload.bench.load_script import LoadScript, write_script
from forebay.workload.bench.prompts import PromptGenerator, probe_maker
from forebay.workload.bench.result import Result, summarise
from forebay.workload.bench.run_load import Played, play
from forebay.workload.bench.samples import RequestSample
from forebay.workload.bench.settings import BenchSettings, CacheTemperature, Workload
from forebay.workload.client import Client
from forebay.workload.counters import difference, read_hits
from forebay.workload.failures import RequestFailure
from forebay.workload.target import ServerIdentity, identify, is_ready

__all__ = ["Bench", "measure"]

Watch = Callable[[str, int, int], None]  # what is being done, requests done, requests in all


async def measure(target: str, url: str, settings: BenchSettings, *, watch: Watch = lambda *_: None) -> Result:
    """Measure one server once.

    Raises:
        DeadError: nothing ready answers, or it went away.
        UsageError: the workload cannot be made, or the model is not served.
        NotInEffectError: the cache's state was asked for and is not in effect.
    """
    bench = await Bench.connect(target, url, settings)
    try:
        return await bench.run(salt_of(settings), watch=watch)
    finally:
        await bench.close()


def salt_of(settings: BenchSettings, part: str = "") -> str:
    """New for every run, unless a seed makes it the same."""
    fixed = settings.seed if settings.seed is not None else secrets.token_hex(8)
    return f"{fixed} {part}".strip()


class Bench:
    """A server that was found ready, with what its requests need. Make it with ``connect``."""

    def __init__(
        self, target: str, client: Client, server: ServerIdentity, maker: PromptGenerator, settings: BenchSettings
    ) -> None:
        self.target = target
        self._client = client
        self._server = server
        self._maker = maker
        self._settings = settings

    @classmethod
    async def connect(cls, target: str, url: str, settings: BenchSettings) -> Bench:
        """Find out what answers at ``url``, and how prompts can be sent there.

        Raises:
            DeadError: nothing ready answers.
        """
        client = Client(url, api_key=settings.api_key)
        try:
            if not await is_ready(client):
                raise DeadError(f"{url} is not ready", fix=f"forebay wait {url}")
            server = await identify(client, model=settings.model)
            tokens = settings.tokens and settings.workload in (Workload.FIXED, Workload.TRACE)
            maker = await probe_maker(client, server.model, "", tokens=tokens)
        except RequestFailure as failure:
            await client.close()
            raise DeadError(f"{url} does not answer: {failure.message}") from failure
        except BaseException:
            await client.close()
            raise
        return cls(target, client, server, maker, settings)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def run(self, salt: str, *, watch: Watch = lambda *_: None) -> Result:
        """Bring the cache into its state, play the load, and sum up.

        Raises:
            As ``measure``.
        """
        settings = self._settings
        maker = self._maker.with_salt(salt)
        script = write_script(settings, maker)
        try:
            cache = await self._prepare(script, maker, watch)
            before = await read_hits(self._client, self._server.kind)
            played = await self._play(script, "measuring", watch)
            moved = difference(before, await read_hits(self._client, self._server.kind))
        except RequestFailure as failure:
            raise DeadError(f"{self._client.url} does not answer: {failure.message}") from failure
        if not any(sample.ok for sample in played.samples):
            kinds = sorted({sample.error or "" for sample in played.samples})
            raise UsageError(
                f"no request succeeded at {self._client.url}: {', '.join(kinds)}",
                fix="forebay doctor, or smaller prompts",
            )
        result = summarise(
            self.target,
            self._server.model,
            self._server.kind,
            describe(settings, script, maker),
            cache,
            script,
            played,
            moved,
        )
        if settings.cache is CacheTemperature.WARM:
            return _warm_seen(result)
        return result

    async def _prepare(self, script: LoadScript, maker: PromptGenerator, watch: Watch) -> CacheRecord:
        if self._settings.cache is CacheTemperature.COLD:
            watch("flushing", 0, script.requests)
            return await flush_seen(self._client, self._server, maker)
        if self._settings.cache is CacheTemperature.WARM:
            await self._play(script, "warming", watch)
            return CacheRecord(CacheTemperature.WARM, False, "the same requests were played once before")
        repeated = self._settings.seed is not None or self._settings.workload is Workload.PROMPTS
        evidence = "nothing was done to it; " + (
            "these prompts may have been sent before"
            if repeated
            else "the prompts are new, so only their own repetitions can hit"
        )
        return CacheRecord(CacheTemperature.AS_IS, True, evidence)

    async def _play(self, script: LoadScript, what: str, watch: Watch) -> Played:
        done = 0

        def tell(_sample: RequestSample) -> None:
            nonlocal done
            done += 1
            watch(what, done, script.requests)

        settings = self._settings
        return await play(
            self._client,
            self._server.model,
            script,
            concurrency=settings.concurrency,
            temperature=settings.temperature,
            on_sample=tell,
        )


def describe(settings: BenchSettings, script: LoadScript, maker: PromptGenerator) -> dict[str, Any]:
    """The workload as the record keeps it: every setting, and what came of the automatic ones.
    The API key stays out.
    """
    kept = {name: value for name, value in asdict(settings).items() if name != "api_key" and value is not None}
    shown = {name: str(value) if name in ("trace", "prompts") else value for name, value in kept.items()}
    return {
        **shown,
        "salt": maker.salt,
        "prompts_as": "token ids"
        if maker.highest_id is not None
        else f"words ({maker.tokens_per_word:.2f} tokens a word)",
        "sessions": len(script.sessions),
        "requests": script.requests,
        "loop": "open" if script.timed else "closed",
    }


def _warm_seen(result: Result) -> Result:
    """A warm run whose prompts hit nothing was not warm.

    Raises:
        NotInEffectError: the server reports cached tokens, and there were none.
    """
    if result.cached_tokens == 0:
        raise NotInEffectError(
            "warm: the prompts were played before, and none of their tokens was cached",
            fix="forebay verify: the cache may be off, or smaller than the workload",
        )
    seen = result.cached_tokens is not None
    evidence = f"{result.cache.evidence}; " + (
        f"{result.cached_tokens:,} tokens hit" if seen else "the server reports no cached tokens to see it by"
    )
    return replace(result, cache=CacheRecord(CacheTemperature.WARM, seen, evidence))
