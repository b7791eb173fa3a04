"""/metrics: what the front counts itself, and the cache's last report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay.engine.api.cache_metrics import cache_families
from forebay.engine.ipc.messages import StepReport

__all__ = ["ServerMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        # Else every counter has a second series, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._cache = _CacheCollector()
        self._registry.register(self._cache)
        self._prompt_tokens = self._counter(
            "forebay_prompt_tokens", "Prompt tokens of started requests, by where their KV came from.", "source"
        )
        self._generated = self._counter("forebay_generated_tokens", "Tokens generated.")
        self._finished = self._counter("forebay_requests_finished", "Sequences that ended, by reason.", "reason")
        self._refused = self._counter("forebay_requests_refused", "HTTP requests not taken, by status.", "status")
        self._preemptions = self._counter("forebay_preemptions", "Sequences that had to give their pages back.")
        self._steps = self._counter("forebay_step_tokens", "Tokens that steps computed, by kind.", "kind")
        self._requests = Gauge("forebay_requests", "Sequences now, by state.", ["state"], registry=self._registry)
        self._ttft = self._histogram("forebay_time_to_first_token_seconds", "From the request's arrival.")
        self._latency = self._histogram("forebay_inter_token_latency_seconds", "Between two tokens of a sequence.")
        self._step_seconds = self._histogram("forebay_step_seconds", "Duration of engine steps, by kind.", "kind")
        self._probe_seconds = self._histogram(
            "forebay_probe_seconds", "Probes (GET /health_generate), which no other request metric counts."
        )
        self._seen_preemptions = 0
        for source in ("computed", "device", "host", "disk"):
            self._prompt_tokens.labels(source)
        for state in ("running", "waiting", "loading"):
            self._requests.labels(state)

    def step(self, report: StepReport, probes: int = 0) -> None:
        """Take a step's numbers; ``probes`` of its tokens are no user's."""
        if report.prefill_tokens and report.decode_tokens:
            kind = "mixed"
        else:
            kind = "prefill" if report.prefill_tokens else "decode"
        if report.prefill_tokens or report.decode_tokens:
            self._step_seconds.labels(kind).observe(report.seconds)
            self._steps.labels("prefill").inc(report.prefill_tokens)
            self._steps.labels("decode").inc(report.decode_tokens)
        self._generated.inc(sum(event.token >= 0 for event in report.events) - probes)
        self._preemptions.inc(report.preemptions - self._seen_preemptions)
        self._seen_preemptions = report.preemptions
        self.requests(running=report.running, waiting=report.waiting, loading=report.loading)

    def requests(self, *, running: int, waiting: int, loading: int) -> None:
        """Set the gauges of sequences by state; ``running`` without those that load."""
        self._requests.labels("running").set(running)
        self._requests.labels("waiting").set(waiting)
        self._requests.labels("loading").set(loading)

    def first_token(self, seconds: float, prompt_tokens: int, cached: tuple[int, int, int]) -> None:
        """A sequence's first token came."""
        self._ttft.observe(seconds)
        for source, count in zip(("device", "host", "disk"), cached, strict=True):
            self._prompt_tokens.labels(source).inc(count)
        self._prompt_tokens.labels("computed").inc(prompt_tokens - sum(cached))

    def next_token(self, seconds: float) -> None:
        """A further token came, ``seconds`` after the one before."""
        self._latency.observe(seconds)

    def probed(self, seconds: float) -> None:
        """A probe generated its token."""
        self._probe_seconds.observe(seconds)

    def finished(self, reason: str) -> None:
        """A sequence ended: stop, length, cancelled or error."""
        self._finished.labels(reason).inc()

    def refused(self, status: int) -> None:
        """A request was answered with an error status."""
        self._refused.labels(str(status)).inc()

    def totals(self) -> dict[str, Any]:
        """The counters that the status page shows."""
        totals: dict[str, Any] = {"prompt_tokens": {}, "finished": {}}
        for metric in (self._prompt_tokens, self._generated, self._finished, self._preemptions):
            for sample in next(iter(metric.collect())).samples:
                if not sample.name.endswith("_total"):
                    continue
                name = sample.name.removeprefix("forebay_").removesuffix("_total")
                if name == "prompt_tokens":
                    totals[name][sample.labels["source"]] = sample.value
                elif name == "requests_finished":
                    totals["finished"][sample.labels["reason"]] = sample.value
                else:
                    totals[name] = sample.value
        return totals

    def render(self, cache_stats: dict[str, Any]) -> bytes:
        """The exposition text; ``cache_stats`` is the cache's own report."""
        self._cache.stats = cache_stats
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=_SECONDS, registry=self._registry)


class _CacheCollector(Collector):
    """Turns the cache's report into metric families."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        yield from cache_families(self.stats)
