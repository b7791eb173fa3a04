"""The server's own counters of cached tokens, as differences over a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forebay.servers.registry import server_named
from forebay.workload.client import Client
from forebay.workload.failures import RequestFailure

__all__ = ["TierCounts", "difference", "read_generated", "read_hits"]

_COUNTS_EVERY_STEP = ("embedded", "vllm")  # SGLang counts a request's tokens when it ends


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Prompt tokens served from each tier so far, by /metrics; None when the server does not count them."""

    hits: Mapping[str, float] | None


async def read_hits(client: Client, kind: str) -> TierCounts:
    """Read the counters; None from a server that has none or does not answer."""
    try:
        status, body = await client.get("/metrics")
    except RequestFailure:
        return TierCounts(None)
    if status != 200:
        return TierCounts(None)
    hits = server_named(kind).counters(body.decode("utf-8", "replace")).hits
    return TierCounts(dict(hits) if hits else None)


async def read_generated(client: Client, kind: str) -> float | None:
    """Tokens generated so far, counted at each step; None from a server that counts them otherwise."""
    if kind not in _COUNTS_EVERY_STEP:
        return None
    try:
        status, body = await client.get("/metrics")
    except RequestFailure:
        return None
    return server_named(kind).counters(body.decode("utf-8", "replace")).generated if status == 200 else None


def difference(before: TierCounts, after: TierCounts) -> dict[str, int] | None:
    """Prompt tokens served from each tier between two readings; None when not counted, or when the server restarted
    between them.
    """
    if after.hits is None:
        return None
    first = before.hits or {}
    moved = {tier: round(count - first.get(tier, 0.0)) for tier, count in after.hits.items()}
    return None if any(count < 0 for count in moved.values()) else moved
