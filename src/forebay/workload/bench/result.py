"""The result of one run: the JSON record and the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from forebay.workload.bench.cache import CacheRecord
from forebay.workload.bench.stats import Estimate

__all__ = ["Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """One measured run. Times are seconds, latencies with 95 % intervals; ``by_tier`` counts prompt tokens of this run
    only.
    """

    target: str
    model: str
    server: str
    workload: dict[str, Any]
    cache: CacheRecord
    seconds: float
    requests: int
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    input_per_s: Estimate
    output_per_s: Estimate
    requests_per_s: Estimate
    first_token_s: dict[float, Estimate]
    between_tokens_s: dict[float, Estimate]
    request_s: dict[float, Estimate]
    cached_tokens: int | None
    by_tier_usage: dict[str, int] | None
    by_tier_metrics: dict[str, int] | None
    reused_tokens: int | None
    late_p99_s: float
    own_cpu: float
    notes: list[str]
    timeline: dict[str, list[float]] = field(repr=False)
    first_curve: list[float] = field(repr=False)
    gap_curve: list[float] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """The record with a schema number; percentiles are keyed ``p50`` and so on."""
        record = {"schema": 1, **asdict(self)}
        for name in ("first_token_s", "between_tokens_s", "request_s"):
            record[name] = {f"p{share:g}": value for share, value in record[name].items()}
        return record

    def table(self) -> str:
        """Text for a terminal."""
        rows = [
            ("requests", f"{self.requests:,} in {self.seconds:.1f} s; errors: {_errors(self.errors)}"),
            ("output", _rate(self.output_per_s, "tok/s")),
            ("input", _rate(self.input_per_s, "tok/s")),
            ("requests/s", _rate(self.requests_per_s, "")),
        ]
        named = (
            ("first token", self.first_token_s),
            ("between tokens", self.between_tokens_s),
            ("whole request", self.request_s),
        )
        for name, shares in named:
            text = "  ".join(f"p{share:g} {_ms(value)}" for share, value in shares.items())
            rows.append((name, text or "nothing measured"))
        rows.append(("cached tokens", self._cached()))
        rows.append(
            (
                "cache",
                f"{self.cache.state} ({'observed' if self.cache.seen else 'not observed'}): {self.cache.evidence}",
            )
        )
        rows.append(("this bench", f"{self.own_cpu:.0%} of one core"))
        width = max(len(name) for name, _ in rows)
        head = f"{self.target}  {self.model}  ({self.server})  {self.workload['workload']}"
        return "\n".join(
            [head, *(f"  {name:<{width}}  {text}" for name, text in rows), *(f"  note: {n}" for n in self.notes)]
        )

    def _cached(self) -> str:
        if self.cached_tokens is None and self.by_tier_metrics is None:
            return "not reported"
        share = (
            f" = {self.cached_tokens / self.input_tokens:.1%} of the prompts"
            if self.cached_tokens and self.input_tokens
            else ""
        )
        usage = "" if self.cached_tokens is None else f"{self.cached_tokens:,}{share}"
        tiers = "" if not self.by_tier_usage else f"; usage: {_tiers(self.by_tier_usage)}"
        counters = "" if self.by_tier_metrics is None else f"; metrics: {_tiers(self.by_tier_metrics)}"
        return (usage + tiers + counters).removeprefix("; ")


def _rate(estimate: Estimate, unit: str) -> str:
    return f"{estimate.value:,.1f} {unit}".rstrip() + f"  [{estimate.low:,.1f} – {estimate.high:,.1f}]"


def _ms(estimate: Estimate) -> str:
    return f"{1000 * estimate.value:,.1f} ms [{1000 * estimate.low:,.1f} – {1000 * estimate.high:,.1f}]"


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(errors.items())) or "none"


def _tiers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {count:,}" for tier, count in counts.items())
