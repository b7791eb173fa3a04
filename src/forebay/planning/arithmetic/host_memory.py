"""The host tier's arithmetic that all servers share: the reserve, the largest size that is safe,
and what the copies waste.
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.causes import Cause
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.plan import Provenance
from forebay.planning.request import HostMemoryBudget
from forebay.sizes import GB, GIB

__all__ = ["default_reserve", "gb", "largest_unit", "record_host", "refuse_too_big", "replication"]

_BASE_RESERVE = 10 * GIB
_RANK_RESERVE = 2 * GB


def default_reserve(ranks_per_host: int) -> int:
    """What is kept of the host when ``--host-reserve`` says nothing: 10 GiB, and 2 GB a rank.

    10 GiB is what SGLang itself leaves (``HICACHE_HOST_MEMORY_RESERVE_BYTES``); 2 GB a rank is what
    a worker process takes beside its pools (vLLM 0.32's worker: 2.1 to 2.3 GiB resident; SGLang 0.5.23: 2.4 GB over
    three processes, both on a CPU).
    """
    return _BASE_RESERVE + _RANK_RESERVE * ranks_per_host


def largest_unit(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n >= 0 with ``fits(n)``, for a ``fits`` that holds up to some n and not beyond; 0 where none does.

    Args:
        guess: where to start; any value, the nearer the faster.
    """
    low, high = 0, max(1, guess + 1)
    while fits(high):
        low, high = high, high * 2
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def replication(kv_heads: int, is_latent: bool, attention_ranks: int) -> int:
    """How many ranks of one attention group hold the same KV bytes."""
    if is_latent:
        return attention_ranks
    return max(1, attention_ranks // max(1, kv_heads))


def gb(count: float) -> str:
    """Decimal gigabytes, the unit of this comparison: ``2,400 GB``, ``50.6 GB``."""
    value = count / GB
    return f"{value:,.0f} GB" if value == round(value) or value >= 1000 else f"{value:,.4g} GB"


def refuse_too_big(sheet: PlanBuilder, room: HostMemoryBudget, asked: str, total: int, reserve: int, fix: str) -> None:
    """Write down that ``total`` bytes of host pools do not fit.

    Args:
        asked: the sum in words (``8 × 300 GB``).
    """
    where = f" ({room.note})" if room.how is not Provenance.GIVEN else ""
    if room.limited_by_cgroup and room.mem_available_bytes is not None:
        where = f" (the control group's limit; the host itself has {gb(room.mem_available_bytes)})"
    sheet.refuse(
        Cause.HOST_POOL_TOO_BIG,
        f"host pools: {asked} = {gb(total)} against {gb(room.available_bytes)} available{where}, "
        f"of which {gb(reserve)} are kept for loading and the system",
        fix,
    )


def record_host(sheet: PlanBuilder, room: HostMemoryBudget, reserve: int, reserve_how: Provenance, ranks: int) -> None:
    """Write down what the host has and what is kept of it."""
    sheet.put("host.available_bytes", "host available", room.available_bytes, "bytes", room.how, room.note)
    note = (
        "as given"
        if reserve_how is Provenance.GIVEN
        else f"10 GiB + 2 GB x {ranks} ranks: loading and the rest of the system"
    )
    sheet.put("host.reserve_bytes", "host reserve", reserve, "bytes", reserve_how, note)
