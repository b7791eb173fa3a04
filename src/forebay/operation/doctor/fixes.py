"""The arithmetic of fixes: from the numbers of a message to a value to try."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable

from forebay.operation.doctor.evidence_base import EventMatch
from forebay.sizes import format_binary

__all__ = [
    "by_server",
    "closest_flag",
    "fill",
    "floor_to",
    "gib",
    "host_pool_size",
    "ranks_of",
    "say",
    "utilization_that_fits",
]


def say(text: str) -> Callable[[EventMatch], str]:
    """A fix that needs no arithmetic; ``{field}`` is filled from the event."""

    def fix(found: EventMatch) -> str:
        return fill(text, found)

    return fix


_OPTIONAL = re.compile(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)\}")
_LOOSE = re.compile(r" ?\((?:\{\w+\}[^()]*)\)|:? ?\{\w+\}(?: (?:GiB|GB|MiB|bytes|tokens|s))?(?=[ .,;:)]|$)")


def by_server(*, sglang: str, vllm: str, words: str, embedded: str = "") -> Callable[[EventMatch], str]:
    """A fix in the flags of the server at hand; ``words`` where the server is not known, or has no such flag."""

    def fix(found: EventMatch) -> str:
        known = {"sglang": sglang, "vllm": vllm, "embedded": embedded}
        return fill(known.get(found.base.server) or words, found)

    return fix


def fill(text: str, found: EventMatch) -> str:
    """Fill ``{field}`` from the event.

    What the event does not have is never made up: text in ``[…]`` around a missing field is left out, and so is a missing field
    that stands alone.
    """
    fields = {name: value.strip() for name, value in found.match.groupdict().items() if value}

    def optional(part: re.Match[str]) -> str:
        return part[1] if all(name in fields for name in _FIELD.findall(part[1])) else ""

    text = _OPTIONAL.sub(optional, text)
    text = _LOOSE.sub(lambda part: part[0] if all(n in fields for n in _FIELD.findall(part[0])) else "", text)
    return _FIELD.sub(lambda part: fields.get(part[1], "…"), text)


def floor_to(value: float, step: float) -> float:
    """``value`` rounded down to a multiple of ``step``, cleanly."""
    return round(math.floor(value / step + 1e-9) * step, 10)


def gib(value: float) -> str:
    """Bytes as GiB, for messages."""
    return format_binary(value)


def ranks_of(found: EventMatch) -> int | None:
    """The ranks that share a host's memory, as the log states them; None where it does not (they are never guessed)."""
    return found.base.launch.ranks_per_host


def closest_flag(word: str, known: Iterable[str]) -> str | None:
    """The known flag most like ``word``, or None."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return near[0] if near else None


def host_pool_size(asked_gb: float, free_gb: float, ratio: float | None, ranks: int | None) -> str:
    """What to set so that SGLang's host pool (decimal GB per rank) fits the ``free_gb`` that the message names.

    SGLang keeps 10 GiB aside and names what is left. Versions since 0.5.15 name one rank's share of it (``host_memory_budget_bytes``
    divides by the ranks of the host), older ones what all ranks of the host share.
    """
    fits = max(free_gb, 0.0) * 0.9
    if fits < 1:
        return (
            f"leave the host tier off, or free host memory: {asked_gb:g} GB per rank was asked for and {free_gb:g} GB is free after "
            "the 10 GiB that SGLang keeps aside; reserved huge pages do not count as free"
        )
    shared = ""
    if ranks is None or ranks > 1:
        share = f" ({floor_to(fits / ranks, 1):g})" if ranks and fits / ranks >= 1 else ""
        shared = (
            f"; where all ranks of the host share the {free_gb:g} GB (older versions), that divided by the ranks{share}"
        )
    scaled = floor_to(ratio * fits / asked_gb, 0.01) if ratio and asked_gb else 0.0
    by_ratio = f" (or --hicache-ratio {scaled:g})" if scaled else ""
    return (
        f"set --hicache-size {floor_to(fits, 1):g}{by_ratio} or less: it is decimal GB per rank{shared}. {asked_gb:g} GB per rank was "
        f"asked for and {free_gb:g} GB is free after the 10 GiB that SGLang keeps aside; reserved huge pages do not count as free"
    )


def utilization_that_fits(free: float, total: float) -> float:
    """The largest --gpu-memory-utilization that the free memory allows, in steps of 0.01."""
    return floor_to(free / total, 0.01) if total else 0.0
