"""The cache's report as Prometheus metric families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

__all__ = ["cache_families"]


def cache_families(stats: dict[str, Any], info: dict[str, Any]) -> Iterator[Metric]:
    """Families of one scrape.

    Args:
        stats: what ``PrefixCacheProtocol.stats`` returned last; empty before rank 0 is ready.
        info: rank 0's description.
    """
    yield from ()
