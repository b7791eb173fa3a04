"""Replay of a block-hash trace, and the exact simulation its hits are held against.

A trace line has ``hash_ids``, one id per 512-token block of the prompt (published with the Mooncake paper). Here each
block becomes one page of tokens made out of its id, so that the reuse pattern is the real one at a thirty-second of the
size.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import aiohttp

__all__ = ["TierSimulation", "load_trace", "replay_trace"]


def load_trace(path: Path, requests: int) -> list[list[int]]:
    """The block ids of the first ``requests`` prompts."""
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(requests), strict=False)]


def page_tokens(block: int, page_size: int) -> list[int]:
    """The page of tokens that stands for ``block``."""
    return random.Random(block).choices(range(100, 48000), k=page_size)


class TierSimulation:
    """Least-recently-used by page, deepest first, write-through: what the device and host tiers must hold.

    A page is a prefix (its ids up to and including its own). A request touches its pages from the deepest to the first,
    so a parent is always newer than its children and plain LRU order never drops a parent before them. What the
    running request uses is locked. The last page of a prompt is always computed (its last token must be), so a prompt
    of n pages can hit at most n - 1.
    """

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.capacity = {"device": device_pages, "host": host_pages}
        self.resident: dict[str, OrderedDict[int, None]] = {"device": OrderedDict(), "host": OrderedDict()}
        self._prefixes: dict[tuple[int, int], int] = {}
        """(the parent's number, block) -> the number of that prefix."""

    def request(self, blocks: list[int]) -> tuple[int, int]:
        """(pages hit on the device, pages loaded from the host) of one prompt; updates both tiers."""
        keys: list[int] = []
        for block in blocks:
            step = (keys[-1] if keys else 0, block)
            keys.append(self._prefixes.setdefault(step, len(self._prefixes) + 1))
        device, host = self.resident["device"], self.resident["host"]
        hits = {"device": 0, "host": 0}
        for key in keys[:-1]:
            if key in device:
                hits["device"] += 1
            elif key in host:
                hits["host"] += 1
            else:
                break
        matched = hits["device"] + hits["host"]
        self._touch("device", keys[:matched])
        self._touch("host", keys[:matched])
        # Room for what is loaded and for what is computed. Held is the prefix found; the prompt's last page, which may
        # be there and cannot be used, may go, and is dropped for the new one otherwise.
        self._make_room("device", hits["host"] + len(keys) - matched, set(keys[:matched]))
        for key in keys:
            device[key] = None
        self._touch("device", keys)
        for key in keys:
            if key not in host:
                self._make_room("host", 1, set(keys))
                host[key] = None
        self._touch("host", keys)
        return hits["device"], hits["host"]

    def _touch(self, tier: str, keys: list[int]) -> None:
        for key in reversed(keys):
            if key in self.resident[tier]:
                self.resident[tier].move_to_end(key)

    def _make_room(self, tier: str, pages: int, locked: set[int]) -> None:
        held = self.resident[tier]
        over = len(held) + pages - self.capacity[tier]
        if over > 0:
            for key in list(itertools.islice((k for k in held if k not in locked), over)):
                del held[key]


async def replay_trace(
    url: str, path: Path, requests: int, in_flight: int, page_size: int, device_pages: int, host_pages: int
) -> dict[str, Any]:
    """Send the prompts, one token each; totals a tier beside the simulation's."""
    prompts = load_trace(path, requests)
    simulation = TierSimulation(device_pages, host_pages)
    expected = [simulation.request(blocks) for blocks in prompts]
    got: list[tuple[int, int]] = [(0, 0)] * len(prompts)
    gate = asyncio.Semaphore(in_flight)
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(index: int) -> None:
            tokens = [t for block in prompts[index] for t in page_tokens(block, page_size)]
            body = {"model": "m", "prompt": tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(f"{url}: HTTP {response.status}: {answer}")
            tiers = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
            got[index] = (tiers["device"], tiers["host"])

        async def in_order(index: int) -> None:
            try:
                await one(index)
            finally:
                gate.release()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(len(prompts)):
                await gate.acquire()
                group.create_task(in_order(index))
        seconds = time.perf_counter() - start
    differing = [
        i for i, (g, e) in enumerate(zip(got, expected, strict=True)) if g != (e[0] * page_size, e[1] * page_size)
    ]
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(len(p) for p in prompts) * page_size,
        "seconds": seconds,
        "hits": {"device": sum(g[0] for g in got), "host": sum(g[1] for g in got)},
        "simulated": {
            "device": sum(e[0] for e in expected) * page_size,
            "host": sum(e[1] for e in expected) * page_size,
        },
        "requests_that_differ": len(differing),
        "first_that_differs": differing[:1],
    }
