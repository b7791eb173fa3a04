"""Percentiles and ratios with intervals, by the bootstrap and by Student's t. The random draws are seeded, so results
repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Estimate", "Ratio", "gap_percentiles", "percentiles", "ratio_of_rounds", "throughput"]

_DRAWS = 400
_LEVEL = 0.95
_MAX_GAPS = 100_000
_MAX_AT_ONCE = 1_000_000  # values drawn together: bounds memory
_SLICES = 20
# Quantile 0.995 of Student's t for 1 to 30 degrees of freedom: 99 % intervals.
_T_995 = (
    (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
    + (3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845)
    + (2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750)
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A with its 99 % interval, from paired rounds."""

    value: float
    low: float
    high: float
    rounds: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high


def percentiles(values: Sequence[float], shares: Sequence[float] = (50, 90, 99)) -> dict[float, Estimate]:
    """Percentiles of independent values; intervals by resampling the values. Empty input gives an empty result."""
    if not values:
        return {}
    data = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    drawn = np.empty((_DRAWS, len(shares)))
    step = max(1, _MAX_AT_ONCE // len(data))
    for start in range(0, _DRAWS, step):
        count = min(step, _DRAWS - start)
        picked = data[generator.integers(0, len(data), (count, len(data)))]
        drawn[start : start + count] = np.percentile(picked, shares, axis=1).T
    return _estimates(shares, np.percentile(data, shares), drawn)


def gap_percentiles(gaps: Sequence[Sequence[float]], shares: Sequence[float] = (50, 90, 99)) -> dict[float, Estimate]:
    """Percentiles over all gaps of all requests. Gaps within one request are not independent, so whole requests are
    resampled.
    """
    filled = [np.asarray(request, dtype=np.float64) for request in gaps if len(request)]
    if not filled:
        return {}
    values = np.concatenate(filled)
    owner = np.repeat(np.arange(len(filled)), [len(request) for request in filled])
    generator = np.random.default_rng(0)
    if len(values) > _MAX_GAPS:
        kept = generator.choice(len(values), _MAX_GAPS, replace=False)
        values, owner = values[kept], owner[kept]
    order = np.argsort(values)
    values, owner = values[order], owner[order]
    drawn = np.empty((_DRAWS, len(shares)))
    for draw in range(_DRAWS):
        times = np.bincount(generator.integers(0, len(filled), len(filled)), minlength=len(filled))
        weight = np.cumsum(times[owner])
        if weight[-1] == 0:
            drawn[draw] = np.percentile(values, shares)
            continue
        places = np.searchsorted(weight, np.asarray(shares) / 100 * weight[-1])
        drawn[draw] = values[np.minimum(places, len(values) - 1)]
    return _estimates(shares, np.percentile(values, shares), drawn)


def throughput(times: Sequence[float], amounts: Sequence[float], seconds: float) -> Estimate:
    """Amount per second over a run; the interval resamples 20 slices of the run."""
    if seconds <= 0 or not times:
        return Estimate(0.0, 0.0, 0.0)
    slices, _ = np.histogram(times, bins=_SLICES, range=(0.0, seconds), weights=amounts)
    generator = np.random.default_rng(0)
    drawn = slices[generator.integers(0, _SLICES, (_DRAWS, _SLICES))].sum(axis=1) / seconds
    low, high = np.percentile(drawn, _bounds())
    return Estimate(float(np.sum(amounts)) / seconds, float(low), float(high))


def ratio_of_rounds(a: Sequence[float], b: Sequence[float]) -> Ratio | None:
    """B over A from paired rounds; None with fewer than two usable rounds.

    The mean is over logarithms of the rounds' ratios, so an influence on both sides of a round cancels.
    """
    logs = [math.log(right / left) for left, right in zip(a, b, strict=True) if left > 0 and right > 0]
    count = len(logs)
    if count < 2:
        return None
    middle = sum(logs) / count
    spread = math.sqrt(sum((value - middle) ** 2 for value in logs) / (count - 1))
    half = _T_995[min(count - 1, len(_T_995)) - 1] * spread / math.sqrt(count)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), count)


def _bounds() -> tuple[float, float]:
    return (100 * (1 - _LEVEL) / 2, 100 * (1 + _LEVEL) / 2)


def _estimates(
    shares: Sequence[float], values: NDArray[np.float64], drawn: NDArray[np.float64]
) -> dict[float, Estimate]:
    low, high = np.percentile(drawn, _bounds(), axis=0)
    return {
        share: Estimate(float(value), float(lower), float(upper))
        for share, value, lower, upper in zip(shares, values, low, high, strict=True)
    }
