"""Multi-turn chat as token ids: every turn sends the whole conversation so far, answers included.

Each server returns its answer's token ids in its own way, so that the next turn's prompt is exactly what the server has
already computed and no re-tokenisation blurs the cache's hits.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["ChatLoad", "LoadResult", "Turn", "ask_forebay", "ask_llama_cpp", "ask_sglang", "ask_vllm", "run_chat"]


@dataclass(frozen=True)
class Turn:
    """One answer: token ids and how many prompt tokens came from which tier."""

    output_ids: list[int]
    cached_tokens: int
    by_tier: dict[str, int] = field(default_factory=dict)


Ask = Callable[[aiohttp.ClientSession, str, list[int], int], Awaitable[Turn]]


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: HTTP {response.status}: {(await response.text())[:300]}")
        answer: dict[str, Any] = await response.json()
        return answer


def _openai_body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def ask_forebay(session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int) -> Turn:
    """Completions with ``return_token_ids``; usage tells the tiers."""
    answer = await _post(session, f"{url}/v1/completions", _openai_body(prompt, max_tokens))
    details = answer["usage"]["prompt_tokens_details"]
    return Turn(answer["choices"][0]["token_ids"], details["cached_tokens"], details["cached_tokens_details"])


async def ask_vllm(session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int) -> Turn:
    """Completions with ``return_token_ids``; needs --enable-prompt-tokens-details."""
    answer = await _post(session, f"{url}/v1/completions", _openai_body(prompt, max_tokens))
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Turn(answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0)


async def ask_llama_cpp(session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int) -> Turn:
    """The native /completion; its timings count the prompt's tokens as cached (``cache_n``) and computed
    (``prompt_n``).

    A cached token may have come from the slot or from --cache-ram; the answer does not say which.
    """
    body = {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": True,
    }
    answer = await _post(session, f"{url}/completion", body)
    timings = answer["timings"]
    if timings["cache_n"] + timings["prompt_n"] != len(prompt):
        raise RuntimeError(
            f"{url}: {timings['cache_n']} + {timings['prompt_n']} are not the prompt's {len(prompt)} tokens"
        )
    return Turn(answer["tokens"], timings["cache_n"])


async def ask_sglang(session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int) -> Turn:
    """The native /generate; meta_info tells the tiers."""
    params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    answer = await _post(session, f"{url}/generate", {"input_ids": prompt, "sampling_params": params})
    meta = answer["meta_info"]
    return Turn(answer["output_ids"], meta.get("cached_tokens", 0), meta.get("cached_tokens_details") or {})


@dataclass(frozen=True)
class ChatLoad:
    """The workload: ``conversations`` x ``turns`` over shared system prompts, taken round-robin."""

    conversations: int = 64
    turns: int = 8
    system_prompts: int = 8
    system_tokens: int = 256
    new_tokens: int = 448
    answer_tokens: int = 64
    in_flight: int = 16
    seed: int = 1

    @property
    def working_set_tokens(self) -> int:
        """Tokens of all conversations at their end, shared system prompts counted once."""
        own = self.conversations * self.turns * (self.new_tokens + self.answer_tokens)
        return own + self.system_prompts * self.system_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens of one conversation at its end."""
        return self.system_tokens + self.turns * (self.new_tokens + self.answer_tokens)


@dataclass
class LoadResult:
    """Totals of one run of a load."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    seconds_by_turn: list[float] = field(default_factory=list)
    outputs: list[list[list[int]]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens served a second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds


async def run_chat(url: str, load: ChatLoad, ask: Ask) -> LoadResult:
    """Run ``load``: turn 1 of every conversation, then turn 2 ..., ``in_flight`` at a time."""
    rng = random.Random(load.seed)
    words = range(100, 48000)
    systems = [rng.choices(words, k=load.system_tokens) for _ in range(load.system_prompts)]
    histories = [list(systems[i % load.system_prompts]) for i in range(load.conversations)]
    inputs = [[rng.choices(words, k=load.new_tokens) for _ in range(load.turns)] for _ in range(load.conversations)]
    result = LoadResult(outputs=[[] for _ in range(load.conversations)])
    gate = asyncio.Semaphore(load.in_flight)
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(index: int, turn: int) -> None:
            async with gate:
                prompt = histories[index] + inputs[index][turn]
                answer = await ask(session, url, prompt, load.answer_tokens)
                histories[index] = prompt + answer.output_ids
                result.prompt_tokens += len(prompt)
                result.output_tokens += len(answer.output_ids)
                result.cached_tokens += answer.cached_tokens
                result.outputs[index].append(answer.output_ids)
                for tier, count in answer.by_tier.items():
                    result.by_tier[tier] = result.by_tier.get(tier, 0) + count

        start = time.perf_counter()
        for turn in range(load.turns):
            began = time.perf_counter()
            await asyncio.gather(*(one(i, turn) for i in range(load.conversations)))
            result.seconds_by_turn.append(time.perf_counter() - began)
        result.seconds = time.perf_counter() - start
    return result
