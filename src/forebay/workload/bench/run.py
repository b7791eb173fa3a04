"""One measured run: identity, cache state, load, counters, result."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from forebay.errors import DeadError, NotInEffectError, UsageError
from forebay.workload.bench.cache import CacheRecord, flush_and_check
from forebay.workload.bench.load_script import LoadScript, write_script
from forebay.workload.bench.prompts import PromptGenerator, probe_prompt_generator
from forebay.workload.bench.result import Result
from forebay.workload.bench.run_load import LoadResult, run_load
from forebay.workload.bench.samples import RequestSample
from forebay.workload.bench.settings import BenchSettings, CacheTemperature, Workload
from forebay.workload.bench.summary import RunContext, summarise
from forebay.workload.client import Client
from forebay.workload.counters import difference, read_hits
from forebay.workload.failures import RequestFailure
from forebay.workload.target import ServerIdentity, identify, is_ready

__all__ = ["Bench", "measure"]

OnProgress = Callable[[str, int, int], None]  # the phase, requests done, requests in total


async def measure(
    target: str, url: str, settings: BenchSettings, *, on_progress: OnProgress = lambda *_: None
) -> Result:
    """Measure one server once.

    Raises:
        DeadError: the server is not ready, or stopped answering.
        UsageError: the workload cannot be made, or the model is not served.
        NotInEffectError: the cache is not in the state asked for.
    """
    bench = await Bench.connect(target, url, settings)
    try:
        return await bench.run(salt_of(settings), on_progress=on_progress)
    finally:
        await bench.close()


def salt_of(settings: BenchSettings, part: str = "") -> str:
    """The salt of the prompts: random, unless a seed is given."""
    fixed = settings.seed if settings.seed is not None else secrets.token_hex(8)
    return f"{fixed} {part}".strip()


class Bench:
    """A bench of one server that is ready. Made with ``connect``."""

    def __init__(
        self, target: str, client: Client, server: ServerIdentity, generator: PromptGenerator, settings: BenchSettings
    ) -> None:
        self.target = target
        self._client = client
        self._server = server
        self._generator = generator
        self._settings = settings

    @classmethod
    async def connect(cls, target: str, url: str, settings: BenchSettings) -> Bench:
        """Find out what the server at ``url`` serves, and how prompts can be sent to it.

        Raises:
            DeadError: it is not ready.
        """
        client = Client(url, api_key=settings.api_key)
        try:
            if not await is_ready(client):
                raise DeadError(f"{url} is not ready", fix=f"forebay wait {url}")
            server = await identify(client, model=settings.model)
            tokens = settings.tokens and settings.workload in (Workload.FIXED, Workload.TRACE)
            generator = await probe_prompt_generator(client, server.model, "", tokens=tokens)
        except RequestFailure as failure:
            await client.close()
            raise DeadError(f"{url} does not answer: {failure.message}") from failure
        except BaseException:
            await client.close()
            raise
        return cls(target, client, server, generator, settings)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def run(self, salt: str, *, on_progress: OnProgress = lambda *_: None) -> Result:
        """Bring the cache into the state asked for, send the load, and summarise.

        Raises:
            As ``measure``.
        """
        settings = self._settings
        generator = self._generator.with_salt(salt)
        script = write_script(settings, generator)
        try:
            cache = await self._prepare(script, generator, on_progress)
            before = await read_hits(self._client, self._server.kind)
            load = await self._run_load(script, "measuring", on_progress)
            moved = difference(before, await read_hits(self._client, self._server.kind))
        except RequestFailure as failure:
            raise DeadError(f"{self._client.url} does not answer: {failure.message}") from failure
        if not any(sample.ok for sample in load.samples):
            kinds = sorted({sample.error or "" for sample in load.samples})
            raise UsageError(
                f"no request succeeded at {self._client.url}: {', '.join(kinds)}",
                fix="forebay doctor, or smaller prompts",
            )
        server, workload = self._server, describe(settings, script, generator)
        context = RunContext(self.target, server.model, server.kind, workload, cache, script, moved)
        result = summarise(context, load)
        if settings.cache is CacheTemperature.WARM:
            return _check_warm(result)
        return result

    async def _prepare(self, script: LoadScript, generator: PromptGenerator, on_progress: OnProgress) -> CacheRecord:
        if self._settings.cache is CacheTemperature.COLD:
            on_progress("flushing", 0, script.requests)
            return await flush_and_check(self._client, self._server, generator)
        if self._settings.cache is CacheTemperature.WARM:
            await self._run_load(script, "warming", on_progress)
            return CacheRecord(CacheTemperature.WARM, False, "the same requests were sent once before")
        repeated = self._settings.seed is not None or self._settings.workload is Workload.PROMPTS
        evidence = "not changed; " + (
            "these prompts may have been sent before"
            if repeated
            else "the prompts are new, so only their own repetitions can hit"
        )
        return CacheRecord(CacheTemperature.AS_IS, True, evidence)

    async def _run_load(self, script: LoadScript, what: str, on_progress: OnProgress) -> LoadResult:
        done = 0

        def on_status(_sample: RequestSample) -> None:
            nonlocal done
            done += 1
            on_progress(what, done, script.requests)

        settings = self._settings
        return await run_load(
            self._client,
            self._server.model,
            script,
            concurrency=settings.concurrency,
            temperature=settings.temperature,
            on_sample=on_status,
        )


def describe(settings: BenchSettings, script: LoadScript, generator: PromptGenerator) -> dict[str, Any]:
    """The workload for the record: every setting except the API key, and the values of automatic ones."""
    kept = {name: value for name, value in asdict(settings).items() if name != "api_key" and value is not None}
    shown = {name: str(value) if name in ("trace", "prompts") else value for name, value in kept.items()}
    return {
        **shown,
        "salt": generator.salt,
        "prompts_as": "token ids"
        if generator.highest_id is not None
        else f"words ({generator.tokens_per_word:.2f} tokens per word)",
        "sessions": len(script.sessions),
        "requests": script.requests,
        "loop": "open" if script.timed else "closed",
    }


def _check_warm(result: Result) -> Result:
    """Check that the prompts of a warm run hit the cache.

    Raises:
        NotInEffectError: the server reports cached tokens, and there were none.
    """
    if result.cached_tokens == 0:
        raise NotInEffectError(
            "warm: the prompts were sent before, and none of their tokens was cached",
            fix="forebay verify: the cache may be off, or smaller than the workload",
        )
    seen = result.cached_tokens is not None
    evidence = f"{result.cache.evidence}; " + (
        f"{result.cached_tokens:,} tokens hit" if seen else "the server does not report cached tokens"
    )
    return replace(result, cache=CacheRecord(CacheTemperature.WARM, seen, evidence))
