"""The text format of /metrics: the few lines asked for, without a client library.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (``name{label="value",...} number``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MetricSamples", "parse_metrics"]

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class MetricSamples:
    """Samples by whole name; ``_bucket`` and ``_created`` are left out while reading."""

    samples: Mapping[str, list[tuple[dict[str, str], float]]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all series of ``name`` that carry ``labels``; None when there is none."""
        found = [value for has, value in self.samples.get(name, ()) if labels.items() <= has.items()]
        return sum(found) if found else None

    def largest(self, name: str) -> float | None:
        """The largest sample: for gauges that every rank reports alike."""
        return max((value for _, value in self.samples.get(name, ())), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of ``name`` keyed by the value of ``label``."""
        sums: dict[str, float] = {}
        for has, value in self.samples.get(name, ()):
            if label in has:
                sums[has[label]] = sums.get(has[label], 0.0) + value
        return sums

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the first sample of an info metric."""
        series = self.samples.get(name)
        return dict(series[0][0]) if series else {}


def parse_metrics(text: str) -> MetricSamples:
    """Read ``text``; lines that are no sample are passed over, NaN counts as no sample."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name.endswith(("_bucket", "_created")):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if value != value:
            continue
        samples.setdefault(match[1], []).append((dict(_LABEL.findall(match[2] or "")), value))
    return MetricSamples(samples)
