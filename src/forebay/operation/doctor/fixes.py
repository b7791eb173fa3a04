"""The arithmetic of fixes: from the numbers of a message to a value to try."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable

from forebay.operation.doctor.rule import Found
from forebay.sizes import GB, GIB, format_binary, format_size

__all__ = [
    "closest_flag",
    "floor_to",
    "gib",
    "host_pool_size",
    "ranks_of",
    "say",
    "utilization_that_fits",
]


def say(text: str) -> Callable[[Found], str]:
    """A fix that needs no arithmetic; ``{group}`` is filled from the match."""

    def fix(found: Found) -> str:
        return fill(text, found)

    return fix


def fill(text: str, found: Found) -> str:
    """Fill ``{group}`` from the match; a group that did not take part becomes ``?``."""
    groups: dict[str, str] = {}
    for name, value in found.match.groupdict().items():
        base = name.rstrip("0123456789")  # alternatives of one pattern are called port, port2, ...
        if value or base not in groups:
            groups[base] = (value or "?").strip()
    return re.sub(r"\{(\w+)\}", lambda m: groups.get(m[1], m[0]), text)


def floor_to(value: float, step: float) -> float:
    """``value`` rounded down to a multiple of ``step``, cleanly."""
    return round(math.floor(value / step + 1e-9) * step, 10)


def gib(value: float) -> str:
    """Bytes as GiB, for messages."""
    return format_binary(value)


def ranks_of(found: Found) -> int:
    """How many ranks the log shows: the highest rank seen plus one, or what was asked for; at least 1."""
    asked = [found.transcript.asked.get(key, "") for key in ("tp_size", "tensor_parallel_size")]
    counts = [int(text) for text in asked if text.isdigit()]
    seen = max(found.transcript.ranks, default=0) + 1
    return max([seen, *counts])


def closest_flag(word: str, known: Iterable[str]) -> str | None:
    """The known flag most like ``word``, or None."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return near[0] if near else None


_SGLANG_ASIDE_GB = 10 * GIB / GB


def host_pool_size(asked_gb: float, free_gb: float, ratio: float | None, ranks: int) -> str:
    """What to set so that SGLang's host pool (decimal GB per rank) fits ``free_gb``, which all ranks share.

    SGLang keeps 10 GiB aside; older versions print what is free before that, so a refused pool can look smaller than
    it.
    """
    room = free_gb - _SGLANG_ASIDE_GB if asked_gb <= free_gb else free_gb
    fits = max(room, 0.0) * 0.9 / max(ranks, 1)
    total = f" (x {ranks} ranks = {format_size(asked_gb * ranks * GB)} in total)" if ranks > 1 else ""
    if fits >= 1:
        return (
            f"set --hicache-size {floor_to(fits, 1):g} or less: it is decimal GB per rank; {asked_gb:g} GB per rank "
            "was "
            f"asked for{total} and {free_gb:g} GB is free"
        )
    scaled = floor_to((ratio or 2.0) * fits / asked_gb, 0.01)
    return (
        f"set --hicache-ratio {scaled:g} or less, or free host memory: {asked_gb:g} GB per rank was asked for{total} "
        "and "
        f"{free_gb:g} GB is free"
    )


def utilization_that_fits(free: float, total: float) -> float:
    """The largest --gpu-memory-utilization that the free memory allows, in steps of 0.01."""
    return floor_to(free / total, 0.01) if total else 0.0


def size_in_gib(value: float) -> float:
    """Bytes to GiB."""
    return value / GIB
