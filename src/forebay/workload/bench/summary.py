"""From the samples of a run to its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.workload.answers import TIERS
from forebay.workload.bench.cache import CacheRecord
from forebay.workload.bench.load_script import LoadScript
from forebay.workload.bench.result import Result
from forebay.workload.bench.run_load import LoadResult
from forebay.workload.bench.samples import RequestSample
from forebay.workload.bench.stats import gap_percentiles, percentiles, throughput

__all__ = ["RunContext", "cache_note", "summarise"]

_BOTTLENECK_SHARE = 0.8  # share of a core at which the bench itself may be the bottleneck
_CACHE_MARGIN = 0.05  # share of prompt tokens that may hit beyond the workload's own repetitions
_BINS = 60


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run measured: the server, the workload, the state of the cache, and hits by the server's counters."""

    target: str
    model: str
    server: str
    workload: Mapping[str, Any]
    cache: CacheRecord
    script: LoadScript
    by_tier_metrics: dict[str, int] | None


def summarise(context: RunContext, load: LoadResult) -> Result:
    """The result of a run, from its samples. Failed requests count as errors and in nothing else."""
    good = [sample for sample in load.samples if sample.ok]
    ends = [sample.finished or 0.0 for sample in good]
    firsts = [sample.first_s for sample in good]
    gaps = [sample.gaps for sample in good]
    inputs = [sample.usage.prompt_tokens if sample.usage else 0 for sample in good]
    token_times, token_counts = _token_flow(good)
    late = percentiles([sample.started - sample.due for sample in load.samples], (99,))
    result = Result(
        target=context.target,
        model=context.model,
        server=context.server,
        workload=dict(context.workload),
        cache=context.cache,
        seconds=load.seconds,
        requests=len(good),
        errors=dict(Counter(sample.error for sample in load.samples if sample.error is not None)),
        input_tokens=sum(inputs),
        output_tokens=sum(sample.output_tokens for sample in good),
        input_per_s=throughput(ends, inputs, load.seconds),
        output_per_s=throughput(token_times, token_counts, load.seconds),
        requests_per_s=throughput(ends, [1.0] * len(ends), load.seconds),
        first_token_s=percentiles(firsts),
        between_tokens_s=gap_percentiles(gaps),
        request_s=percentiles([(sample.finished or 0.0) - sample.due for sample in good]),
        **_cached(good),
        by_tier_metrics=context.by_tier_metrics,
        late_p99_s=late[99].value if late else 0.0,
        own_cpu=load.own_cpu,
        notes=[],
        timeline=_timeline(good, load.seconds),
        first_curve=_curve(firsts),
        gap_curve=_curve([gap for request in gaps for gap in request]),
    )
    result.notes.extend(_notes(result, context.script))
    return result


def _cached(good: list[RequestSample]) -> dict[str, Any]:
    """Cached tokens by usage, and the tokens that the workload repeats; None where they are not known."""
    usages = [sample.usage for sample in good if sample.usage is not None]
    known = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    by_tier = {tier: sum(usage.by_tier.get(tier, 0) for usage in usages) for tier in TIERS}
    reused = [sample.reused_tokens for sample in good]
    return {
        "cached_tokens": sum(known) if known else None,
        "by_tier_usage": by_tier if any(usage.by_tier for usage in usages) else None,
        "reused_tokens": None if any(value is None for value in reused) else sum(value or 0 for value in reused),
    }


def cache_note(input_tokens: int, cached_tokens: int | None, reused_tokens: int | None) -> str | None:
    """A note when more prompt tokens hit than the workload itself repeats; else None."""
    if not cached_tokens or not input_tokens:
        return None
    share = cached_tokens / input_tokens
    if reused_tokens is None:
        return (
            f"this result measured the cache: {share:.1%} of the prompt tokens came from it "
            "(how much the prompts repeat is unknown)"
        )
    designed = min(reused_tokens / input_tokens, 1.0)
    if share > designed + _CACHE_MARGIN:
        return (
            f"this result measured the cache: {share:.1%} of the prompt tokens came from it, "
            f"while the workload itself repeats {designed:.1%}"
        )
    return None


def _notes(result: Result, script: LoadScript) -> list[str]:
    notes = []
    judged = cache_note(result.input_tokens, result.cached_tokens, result.reused_tokens)
    if judged is not None:
        notes.append(judged)
    if script.left_out:
        notes.append(f"{script.left_out:,} trace records were longer than --max-input-tokens and left out")
    if result.own_cpu > _BOTTLENECK_SHARE:
        notes.append(f"the bench used {result.own_cpu:.0%} of a core: it may have been the bottleneck")
    if script.timed and result.late_p99_s > 0.1:
        notes.append(f"requests were sent up to {result.late_p99_s:.2f} s (p99) after their time")
    if result.errors:
        notes.append("failed requests ended their sessions; throughput and latencies are those of the others")
    return notes


def _token_flow(good: list[RequestSample]) -> tuple[list[float], list[float]]:
    """The time of each event with tokens, and its weight: the events of a request add up to its tokens."""
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
    """Quantiles at equal steps from 0 to 1, for a plot."""
    if not values:
        return []
    return [float(value) for value in np.quantile(np.asarray(values), np.linspace(0, 1, points))]
