"""The settings of a bench."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from forebay.errors import UsageError

__all__ = ["BenchSettings", "CacheTemperature", "Workload"]


class Workload(StrEnum):
    """The kinds of load."""

    CHAT = "chat"  # multi-turn conversations whose groups share a system prompt
    FIXED = "fixed"  # prompts and answers of fixed lengths, nothing shared
    TRACE = "trace"  # a recorded trace: arrival times, lengths, block ids
    PROMPTS = "prompts"  # the user's own JSONL


class CacheTemperature(StrEnum):
    """The state of the server's cache before the run."""

    COLD = "cold"  # flushed, and checked
    WARM = "warm"  # the same prompts are sent once before
    AS_IS = "as-is"  # not changed; prompts are new in every run, except the user's own


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """One bench.

    Attributes:
        concurrency: closed loop: sessions in flight at once. Ignored with a rate or a trace's own times.
        rate: open loop: sessions per second, Poisson arrivals; None for a closed loop.
        sessions: the most sessions (chat), requests (fixed), trace records or prompts; None: all there are.
        turns, groups, system_tokens, user_tokens: shape of ``chat``.
        input_tokens, output_tokens: shape of ``fixed``; ``output_tokens`` holds for every workload but the trace.
        block_tokens: tokens made for one 512-token block of the trace; a smaller number scales the whole trace down.
        speed: how much faster than recorded a trace is replayed.
        max_input_tokens: longer prompts of a trace are left out, and counted.
        seed: makes the prompts the same in every run; None draws new ones, so that no run hits the cache of an earlier
            one.
        tokens: send prompts as token ids where the server accepts them; False sends words.
    """

    workload: Workload = Workload.CHAT
    cache: CacheTemperature = CacheTemperature.AS_IS
    concurrency: int = 16
    rate: float | None = None
    sessions: int | None = None
    turns: int = 4
    groups: int = 4
    system_tokens: int = 512
    user_tokens: int = 64
    input_tokens: int = 512
    output_tokens: int = 128
    trace: Path | None = None
    prompts: Path | None = None
    block_tokens: int = 512
    speed: float = 1.0
    timed: bool = True
    max_input_tokens: int | None = None
    seed: int | None = None
    tokens: bool = True
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.workload is Workload.TRACE and self.trace is None:
            raise UsageError("the trace workload needs a trace", fix="--trace FILE, or set FOREBAY_TRACE")
        if self.workload is Workload.PROMPTS and self.prompts is None:
            raise UsageError("the prompts workload needs a file", fix="--prompts FILE.jsonl")
        if self.cache is CacheTemperature.WARM and self.workload is Workload.TRACE and self.timed:
            raise UsageError("a warm trace would be replayed twice in real time", fix="add --closed, or --cache cold")
        for name in ("concurrency", "turns", "groups", "output_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it is at least 1")
        for name in ("speed", "rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"--{name} is {value}; it is more than 0")
        for name in ("system_tokens", "user_tokens", "input_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it is at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature is {self.temperature}; it is 0 or more")

    @property
    def session_count(self) -> int:
        """The number of sessions of a generated workload."""
        if self.sessions is not None:
            return self.sessions
        return self.concurrency * (4 if self.workload is Workload.CHAT else 8)
