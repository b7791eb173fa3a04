"""The cache's counters, and the measured rates by which it decides whether to load or to recompute."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from forebay.engine.cache.interface import CachedTokens

__all__ = ["Accounting", "Rate", "Rates"]


class Rate:
    """A moving average of units per second, weighted by time: a long transfer counts more than a short one."""

    __slots__ = ("_amount", "_seconds", "initial")

    MEMORY_S = 2.0
    """Seconds of activity after which an observation has half its weight."""

    def __init__(self, initial: float | None = None) -> None:
        self.initial = initial
        """Used until there is an observation; None: not known."""
        self._amount = 0.0
        self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """``amount`` units took ``seconds``."""
        if seconds <= 0 or amount <= 0:
            return
        keep = 0.5 ** (seconds / self.MEMORY_S)
        self._amount = keep * self._amount + amount
        self._seconds = keep * self._seconds + seconds

    @property
    def value(self) -> float | None:
        """Units per second, or None."""
        return self._amount / self._seconds if self._seconds else self.initial


class Rates:
    """Bytes per second out of each tier, and tokens per second of prefill."""

    def __init__(self) -> None:
        self.prefill = Rate()
        self.host = Rate()
        self.disk = Rate()

    def load_seconds(self, host_bytes: int, disk_bytes: int) -> float:
        """Time to load this much to the device; an unknown rate counts as infinite."""
        host, disk = self.host.value, self.disk.value
        # What comes from disk passes through the host.
        seconds = (host_bytes + disk_bytes) / host if host else 0.0
        return seconds + (disk_bytes / disk if disk else 0.0)

    def recompute_seconds(self, tokens: int) -> float | None:
        """Time to compute this many tokens again; None while nothing has been measured."""
        prefill = self.prefill.value
        return tokens / prefill if prefill else None


class Accounting:
    """Counters. They only grow."""

    def __init__(self) -> None:
        self.requests = 0
        self.requests_with_hit = 0
        self.tokens: Counter[str] = Counter()
        """Prompt tokens not computed, by tier."""
        self.committed_pages = 0
        self.pages: Counter[str] = Counter()
        """Pages moved (``device_host``, ``host_disk``, ``host_device``, ``disk_host``) and evicted (``device``,
        ``host``).
        """
        self.bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.drops: Counter[str] = Counter()
        """Pages that were not backed up or not loaded although they should have been, by reason."""
        self.loads_failed = 0
        self.loads_declined_tokens = 0
        """Tokens found in a tier and recomputed because that is faster."""
        self.layer_wait_s = 0.0
        """Time for which steps waited for layers to arrive."""
        self.saved_s = 0.0
        """Prefill time that hits have saved, by the measured rate."""

    def hit(self, cached: CachedTokens, rates: Rates) -> None:
        """A request uses ``cached``."""
        self.requests += 1
        self.requests_with_hit += cached.total > 0
        self.tokens["device"] += cached.device
        self.tokens["host"] += cached.host
        self.tokens["disk"] += cached.disk
        self.saved_s += rates.recompute_seconds(cached.total) or 0.0

    def moved(self, way: str, pages: int, nbytes: int, seconds: float) -> None:
        """A transfer is complete."""
        self.pages[way] += pages
        self.bytes[way] += nbytes
        self.seconds[way] += seconds

    def dropped(self, reasons: Iterable[str]) -> None:
        """One reason per page."""
        self.drops.update(reasons)

    def as_dict(self) -> dict[str, Any]:
        """For /metrics and /cache."""
        return {
            "requests": self.requests,
            "requests_with_hit": self.requests_with_hit,
            "hit_tokens": {tier: self.tokens[tier] for tier in ("device", "host", "disk")},
            "committed_pages": self.committed_pages,
            "pages": dict(self.pages),
            "bytes": dict(self.bytes),
            "seconds": dict(self.seconds),
            "drops": dict(self.drops),
            "loads_failed": self.loads_failed,
            "loads_declined_tokens": self.loads_declined_tokens,
            "layer_wait_s": self.layer_wait_s,
            "prefill_saved_s": self.saved_s,
        }
