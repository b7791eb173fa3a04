"""The load test: 200 clients, ragged lengths, a third of them hanging up midway.

    python -m benchmarks.load --model smollm2
    python -m benchmarks.load --model smollm2 --clients 200 --rounds 4 --json load.json

It passes when nothing but 429s was refused, every page is free at the end, and memory is flat over the rounds. Exit
status 0 or 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.lib import peer_servers as ps

MEMORY_SLACK = 1.05
"""Memory after the last round may be this much of that after the first."""


@dataclass
class Round:
    """One round's outcome; ``outcomes`` counts requests by how they ended."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0
    errors: list[str] = field(default_factory=list)


async def one_request(session: aiohttp.ClientSession, url: str, rng: random.Random, outcome: Round) -> None:
    """Ask once, patiently (429 is obeyed), and hang up midway one time in three."""
    length, max_tokens = rng.choice([5, 20, 60, 150, 400]), rng.randrange(4, 64)
    hang_up_at = rng.randrange(1, max_tokens) if rng.random() < 1 / 3 else None
    shared = random.Random(rng.randrange(8))
    prompt = [shared.randrange(100, 40_000) for _ in range(length // 2)]
    prompt += [rng.randrange(100, 40_000) for _ in range(length - len(prompt))]
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    while True:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status == 429:
                outcome.outcomes["429, retried"] += 1
                wait_s = float(answer.headers["retry-after"]) * rng.uniform(0.5, 1.0)
            elif answer.status != 200:
                outcome.outcomes[f"HTTP {answer.status}"] += 1
                outcome.errors.append((await answer.text())[:200])
                return
            else:
                await read_stream(answer, max_tokens, hang_up_at, outcome)
                return
        await asyncio.sleep(wait_s)


async def read_stream(answer: aiohttp.ClientResponse, max_tokens: int, hang_up_at: int | None, outcome: Round) -> None:
    """Count events until the end, or close the connection at ``hang_up_at`` of them."""
    events = 0
    async for line in answer.content:
        if line.startswith(b"data: [DONE]"):
            outcome.outcomes["complete"] += 1
            return
        if line.startswith(b"data: {"):
            if line.startswith(b'data: {"error"'):
                outcome.outcomes["stream error"] += 1
                outcome.errors.append(line.decode()[:200])
                return
            events += 1
            outcome.tokens += 1
            if hang_up_at is not None and events >= hang_up_at:
                outcome.outcomes["hung up"] += 1
                answer.close()
                return
    outcome.outcomes["cut off"] += 1


async def run_round(url: str, clients: int, requests: int, seed: int) -> Round:
    """All clients at once, each with its requests one after the other."""
    outcome = Round()
    began = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client(number: int) -> None:
            rng = random.Random(seed * 100_003 + number)
            for _ in range(requests):
                try:
                    await one_request(session, url, rng, outcome)
                except aiohttp.ClientError as error:
                    outcome.outcomes["connection error"] += 1
                    outcome.errors.append(repr(error)[:200])

        await asyncio.gather(*(client(number) for number in range(clients)))
    outcome.seconds = time.perf_counter() - began
    return outcome


async def held(url: str) -> dict[str, float]:
    """What the server still holds: sequences, leases, device tokens that are neither free nor evictable."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = {"requests": 0.0, "leases": 0.0, "held device tokens": 0.0}
    for line in lines:
        series, _, value = line.rpartition(" ")
        if series.startswith("forebay_requests{"):
            found["requests"] += float(value)
        elif series == "forebay_cache_leases":
            found["leases"] = float(value)
        elif series.startswith("forebay_tier_tokens{") and 'tier="device"' in series and 'state="held"' in series:
            found["held device tokens"] = float(value)
    return found


async def settle(url: str, timeout_s: float = 30) -> dict[str, float]:
    """Wait until nothing is held, or return what still is."""
    deadline = time.perf_counter() + timeout_s
    while any((left := await held(url)).values()) and time.perf_counter() < deadline:
        await asyncio.sleep(0.1)
    return left


def judge(rounds: list[Round], left: dict[str, float]) -> list[str]:
    """What is wrong; empty when the test passes."""
    wrong = []
    for number, outcome in enumerate(rounds):
        bad = {kind: n for kind, n in outcome.outcomes.items() if kind not in ("complete", "hung up", "429, retried")}
        if bad:
            wrong.append(f"round {number}: {bad}: {outcome.errors[:3]}")
    if any(left.values()):
        wrong.append(f"still held: {left}")
    first, last = rounds[min(1, len(rounds) - 1)].memory_bytes, rounds[-1].memory_bytes
    if last > first * MEMORY_SLACK:
        wrong.append(f"memory grew from {first / 1e6:,.0f} MB to {last / 1e6:,.0f} MB")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what `forebay serve` takes")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2, help="a client a round")
    parser.add_argument("--rounds", type=int, default=3, help="memory is compared from the second on")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is stopped on the way out
    flags = ["--device-cache", "200MB", "--host-cache", "200MB", "--max-running", "32", "--max-queue", "100"]
    server = ps.forebay(given.model, given.port, *flags)
    rounds: list[Round] = []
    try:
        ps.start(server, Path(tempfile.mkdtemp(prefix="forebay-load-")))
        for number in range(given.rounds):
            outcome = asyncio.run(run_round(server.url, given.clients, given.requests, number))
            left = asyncio.run(settle(server.url))
            outcome.memory_bytes = ps.tree_rss_bytes(server)
            rounds.append(outcome)
            print(
                f"round {number}: {dict(outcome.outcomes)}, {outcome.tokens / outcome.seconds:,.0f} tokens/s, "
                f"memory {outcome.memory_bytes / 1e6:,.0f} MB, held at the end {left}",
                flush=True,
            )
    finally:
        ps.stop(server)
    wrong = judge(rounds, left)
    print("\n".join(["FAILED", *wrong]) if wrong else "passed")
    if given.json:
        given.json.write_text(json.dumps({"schema": 1, "rounds": [vars(r) for r in rounds], "wrong": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
