"""The result of one run: what the JSON holds, and what the table shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from forebay.workload.answers import TIERS
from forebay.workload.bench.cache import CacheRecord
from forebay.workload.bench.load_script import LoadScript
from forebay.workload.bench.run_load import Played
from forebay.workload.bench.samples import RequestSample
from forebay.workload.bench.stats import Estimate, gap_percentiles, percentiles, throughput

__all__ = ["Result", "judge_cache", "summarise"]

_BUSY = 0.8  # share of a core at which the bench itself may be the bottleneck
_MORE_THAN_DESIGNED = 0.05  # share of prompt tokens
_BINS = 60


@dataclass(frozen=True, slots=True)
class Result:
    """One measured run. Times are seconds, latencies with 95 % intervals;
    ``by_tier`` counts prompt tokens of this run only.
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
        """For a terminal."""
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
            ("cache", f"{self.cache.state} ({'seen' if self.cache.seen else 'not seen'}): {self.cache.evidence}")
        )
        rows.append(("this bench", f"{self.own_cpu:.0%} of one core"))
        width = max(len(name) for name, _ in rows)
        head = f"{self.target}  {self.model}  ({self.server})  {self.workload['workload']}"
        return "\n".join(
            [head, *(f"  {name:<{width}}  {text}" for name, text in rows), *(f"  note: {n}" for n in self.notes)]
        )

    def _cached(self) -> str:
        if self.cached_tokens is None and self.by_tier_metrics is None:
            return "the server does not say"
        share = (
            f" = {self.cached_tokens / self.input_tokens:.1%} of the prompts"
            if self.cached_tokens and self.input_tokens
            else ""
        )
        usage = "" if self.cached_tokens is None else f"{self.cached_tokens:,}{share}"
        tiers = "" if not self.by_tier_usage else f"; usage: {_tiers(self.by_tier_usage)}"
        counters = "" if self.by_tier_metrics is None else f"; metrics: {_tiers(self.by_tier_metrics)}"
        return (usage + tiers + counters).removeprefix("; ")


def summarise(
    target: str,
    model: str,
    server: str,
    workload: Mapping[str, Any],
    cache: CacheRecord,
    script: LoadScript,
    played: Played,
    by_tier_metrics: dict[str, int] | None,
) -> Result:
    """Everything a run says, from its samples. Failed requests count as errors and in nothing else."""
    good = [sample for sample in played.samples if sample.ok]
    usages = [sample.usage for sample in good if sample.usage is not None]
    ends = [sample.finished or 0.0 for sample in good]
    firsts = [sample.first_s for sample in good]
    gaps = [sample.gaps for sample in good]
    inputs = [sample.usage.prompt_tokens if sample.usage else 0 for sample in good]
    cached = [usage.cached_tokens for usage in usages]
    known = [count for count in cached if count is not None]
    reused = [sample.reused_tokens for sample in good]
    by_tier = {tier: sum(usage.by_tier.get(tier, 0) for usage in usages) for tier in TIERS}
    token_times, token_counts = _token_flow(good)
    late = percentiles([sample.started - sample.due for sample in played.samples], (99,))
    result = Result(
        target=target,
        model=model,
        server=server,
        workload=dict(workload),
        cache=cache,
        seconds=played.seconds,
        requests=len(good),
        errors=dict(Counter(sample.error for sample in played.samples if sample.error is not None)),
        input_tokens=sum(inputs),
        output_tokens=sum(sample.output_tokens for sample in good),
        input_per_s=throughput(ends, inputs, played.seconds),
        output_per_s=throughput(token_times, token_counts, played.seconds),
        requests_per_s=throughput(ends, [1.0] * len(ends), played.seconds),
        first_token_s=percentiles(firsts),
        between_tokens_s=gap_percentiles(gaps),
        request_s=percentiles([(sample.finished or 0.0) - sample.due for sample in good]),
        cached_tokens=sum(known) if known else None,
        by_tier_usage=by_tier if any(usage.by_tier for usage in usages) else None,
        by_tier_metrics=by_tier_metrics,
        reused_tokens=None if any(value is None for value in reused) else sum(value or 0 for value in reused),
        late_p99_s=late[99].value if late else 0.0,
        own_cpu=played.own_cpu,
        notes=[],
        timeline=_timeline(good, played.seconds),
        first_curve=_curve(firsts),
        gap_curve=_curve([gap for request in gaps for gap in request]),
    )
    result.notes.extend(_notes(result, script))
    return result


def judge_cache(input_tokens: int, cached_tokens: int | None, reused_tokens: int | None) -> str | None:
    """Whether a run measured the cache; None when hits are no more than the workload's own repetitions."""
    if not cached_tokens or not input_tokens:
        return None
    share = cached_tokens / input_tokens
    if reused_tokens is None:
        return (
            f"this result measured the cache: {share:.1%} of the prompt tokens came from it "
            "(how much the prompts repeat is unknown)"
        )
    designed = min(reused_tokens / input_tokens, 1.0)
    if share > designed + _MORE_THAN_DESIGNED:
        return (
            f"this result measured the cache: {share:.1%} of the prompt tokens came from it, "
            f"while the workload itself repeats {designed:.1%}"
        )
    return None


def _notes(result: Result, script: LoadScript) -> list[str]:
    notes = []
    judged = judge_cache(result.input_tokens, result.cached_tokens, result.reused_tokens)
    if judged is not None:
        notes.append(judged)
    if script.left_out:
        notes.append(f"{script.left_out:,} trace records were longer than --max-input-tokens and left out")
    if result.own_cpu > _BUSY:
        notes.append(f"the bench used {result.own_cpu:.0%} of a core: it may have been the bottleneck")
    if script.timed and result.late_p99_s > 0.1:
        notes.append(f"requests were sent up to {result.late_p99_s:.2f} s (p99) after their time")
    if result.errors:
        notes.append("failed requests ended their sessions: throughput and latencies are of the others")
    return notes


def _token_flow(good: list[RequestSample]) -> tuple[list[float], list[float]]:
    """When tokens came: each event's time, weighted so that a request's events add up to its tokens."""
    times: list[float] = []
    counts: list[float] = []
    for sample in good:
        at = sample.first or 0.0
        weight = sample.output_tokens / (len(sample.gaps) + 1)
        times.append(at)
        counts.append(weight)
        for gap in sample.gaps:
            at += gap
            times.append(at)
            counts.append(weight)
    return times, counts


def _timeline(good: list[RequestSample], seconds: float) -> dict[str, list[float]]:
    """Rates in bins over the run: output tokens, prompt tokens computed, and prompt tokens from each tier."""
    import numpy as np

    bins = max(12, min(_BINS, int(seconds / 0.25)))
    edge = (0.0, max(seconds, 1e-9))

    def rates(times: list[float], amounts: list[float]) -> list[float]:
        sums, _ = np.histogram(times, bins=bins, range=edge, weights=amounts)
        return [float(value) for value in sums / (edge[1] / bins)]

    firsts = [sample.first or 0.0 for sample in good]
    series = {"at_s": [edge[1] * (n + 0.5) / bins for n in range(bins)], "output": rates(*_token_flow(good))}
    tiers: dict[str, list[float]] = {tier: [] for tier in (*TIERS, "cached")}
    computed = []
    for sample in good:
        usage = sample.usage
        cached = (usage.cached_tokens or 0) if usage else 0
        computed.append(float((usage.prompt_tokens if usage else 0) - cached))
        for tier in TIERS:
            tiers[tier].append(float(usage.by_tier.get(tier, 0)) if usage else 0.0)
        tiers["cached"].append(float(cached) if usage and not usage.by_tier else 0.0)
    series["computed"] = rates(firsts, computed)
    for tier, amounts in tiers.items():
        if any(amounts):
            series[tier] = rates(firsts, amounts)
    return series


def _curve(values: list[float], points: int = 200) -> list[float]:
    """Quantiles at even steps from 0 to 1, for a plot."""
    import numpy as np

    if not values:
        return []
    return [float(value) for value in np.quantile(np.asarray(values), np.linspace(0, 1, points))]


def _rate(estimate: Estimate, unit: str) -> str:
    return f"{estimate.value:,.1f} {unit}".rstrip() + f"  [{estimate.low:,.1f} – {estimate.high:,.1f}]"


def _ms(estimate: Estimate) -> str:
    return f"{1000 * estimate.value:,.1f} ms [{1000 * estimate.low:,.1f} – {1000 * estimate.high:,.1f}]"


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(errors.items())) or "none"


def _tiers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {count:,}" for tier, count in counts.items())
