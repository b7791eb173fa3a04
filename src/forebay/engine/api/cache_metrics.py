"""The cache's report as Prometheus metric families, and as the few numbers the status page shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["cache_families", "tier_use"]

_TIERS = ("device", "host", "disk")
_STATES = {"free": "free", "evictable": "evictable", "held": "held", "stored": "evictable"}
"""The report's word -> the label: what lies on disk can all be evicted."""


def tier_use(stats: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Per tier ``capacity`` and ``used`` tokens (used: held or evictable, that is, not free)."""
    uses = {}
    for tier in _TIERS:
        report = stats.get("tiers", {}).get(tier, {})
        tokens = report.get("tokens", {})
        used = sum(count for state, count in tokens.items() if state != "free")
        uses[tier] = {"capacity": report.get("capacity_tokens", 0), "used": used}
    return uses


def cache_families(stats: dict[str, Any]) -> Iterator[Metric]:
    """Families of one scrape.

    Args:
        stats: what ``PrefixCacheProtocol.stats`` returned last; empty before rank 0 is ready.
    """
    if not stats:
        return
    yield _tier_tokens(stats)
    yield _oldest(stats)
    yield _moved(stats, "bytes", "forebay_transfer_bytes", "Bytes moved between tiers.")
    yield _moved(stats, "seconds", "forebay_transfer_seconds", "Time transfers took; they run beside compute.")
    yield _moved(stats, "pages", "forebay_transfer_pages", "Pages moved between tiers.")
    yield _counts(
        stats["drops"], "forebay_dropped_pages", "Pages a tier should have had or given and did not.", "reason"
    )
    evicted = {tier: stats["pages"].get(f"{tier}_evicted", 0) for tier in _TIERS}
    yield _counts(evicted, "forebay_evicted_pages", "Pages whose copy in a tier made room for others.", "tier")
    single = {
        "forebay_loads_failed": (stats["loads_failed"], "Loads that failed or were too slow, and were recomputed."),
        "forebay_loads_declined_tokens": (stats["loads_declined_tokens"], "Tokens found but cheaper to recompute."),
        "forebay_load_wait_seconds": (stats["layer_wait_s"], "Time steps stood still for loads."),
        "forebay_prefill_saved_seconds": (stats["prefill_saved_s"], "Prefill time that cached tokens have saved."),
    }
    for name, (value, text) in single.items():
        yield CounterMetricFamily(name, text, value=value)
    yield GaugeMetricFamily("forebay_cache_leases", "Sequences that hold pages.", value=stats["leases"])
    yield GaugeMetricFamily("forebay_cache_pages", "Pages in the prefix tree.", value=stats["nodes"])


def _tier_tokens(stats: dict[str, Any]) -> Metric:
    family = GaugeMetricFamily(
        "forebay_tier_tokens",
        "Token slots of a tier: free, evictable, held by sequences and transfers; used = evictable + held.",
        labels=["tier", "state"],
    )
    for tier, use in tier_use(stats).items():
        if not use["capacity"]:
            continue
        for state, count in stats["tiers"][tier]["tokens"].items():
            family.add_metric([tier, _STATES[state]], count)
        family.add_metric([tier, "used"], use["used"])
        family.add_metric([tier, "capacity"], use["capacity"])
    return family


def _oldest(stats: dict[str, Any]) -> Metric:
    family = GaugeMetricFamily(
        "forebay_tier_oldest_seconds", "Since when the page that goes next was not used.", labels=["tier"]
    )
    for tier, report in stats["tiers"].items():
        if report.get("oldest_s") is not None:
            family.add_metric([tier], report["oldest_s"])
    return family


def _moved(stats: dict[str, Any], key: str, name: str, text: str) -> Metric:
    """One series a way; the report calls the ways ``device_host`` and so on."""
    family = CounterMetricFamily(name, text, labels=["from", "to"])
    for way in ("device_host", "host_disk", "host_device", "disk_host"):
        family.add_metric(way.split("_"), stats[key].get(way, 0))
    return family


def _counts(counts: dict[str, int], name: str, text: str, label: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
