"""What a run make_progress while it runs: one line for people, events for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TextIO

__all__ = ["Progress", "Tally"]

_TEXTS = {  # events as text
    "server_up": "server ready: {server}",
    "server_down": "server down: {server} ({detail})",
    "continuing": "continuing: {finished:,} of {rows:,} rows are finished",
    "draining": "draining: {in_flight} in flight; {hint}",
    "journal_repaired": "journal repaired: {torn_bytes} bytes of a torn end cut off, "
    "{damaged_lines} damaged lines skipped",
    "rows_broken": "{rows:,} rows had turns that do not follow from the turns before them; "
    "they are asked again from there",
    "rows_gone_from_input": "{rows:,} rows in the journal are no longer in the input; they are left out",
}


@dataclass(slots=True)
class Tally:
    """Counts of this process; ``rows`` starts at the number of rows that earlier processes finished."""

    rows: int = 0
    rows_here: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cached_known: bool = False
    filters: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    rejected: int = 0

    def snapshot(self) -> Tally:
        """A copy."""
        return replace(self, filters=Counter(self.filters))


class Progress:
    """Prints progress. On a terminal one line is rewritten; elsewhere a line is printed every ``plain_every_s``.

    Args:
        total: input rows.
        as_json: events as JSON lines on stdout instead of text on stderr.
    """

    def __init__(self, total: int, *, as_json: bool, stream: TextIO | None = None, plain_every_s: float = 10.0) -> None:
        self._total = total
        self._json = as_json
        self._stream = stream or (sys.stdout if as_json else sys.stderr)
        self._live = not as_json and self._stream.isatty()
        self._every_s = 1.0 if self._live or as_json else plain_every_s
        self._began = time.monotonic()
        self._shown = self._began
        self._clock: Callable[[], float] = time.monotonic

    def event(self, name: str, **fields: object) -> None:
        """Print one event."""
        if self._json:
            self._write(json.dumps({"schema": 1, "event": name, "time_s": round(time.time(), 3), **fields}) + "\n")
            return
        if name in _TEXTS:
            text = _TEXTS[name].format(**fields)
        else:
            text = name.replace("_", " ") + "".join(f" {key}={value}" for key, value in fields.items())
        self._write(("\r\x1b[K" if self._live else "") + text + "\n")

    def show(self, tally: Tally, limits: dict[str, int], errors: Counter[str], *, now: bool = False) -> None:
        """Print the state of the run when it is time, or ``now``. ``tally`` counts rows that are on disk."""
        clock = self._clock()
        if not now and clock - self._shown < self._every_s:
            return
        self._shown = clock
        elapsed = max(clock - self._began, 1e-3)
        row_rate = tally.rows_here / elapsed
        left_s = (self._total - tally.rows) / row_rate if row_rate else None
        hits = tally.cached_tokens / tally.prompt_tokens if tally.cached_known and tally.prompt_tokens else None
        if self._json:
            self.event(
                "progress",
                rows=tally.rows,
                rows_total=self._total,
                turns=tally.turns,
                tokens_per_s=round(tally.output_tokens / elapsed, 1),
                cache_hit_share=None if hits is None else round(hits, 4),
                left_s=None if left_s is None else round(left_s, 1),
                rejected=tally.rejected,
                failed=tally.failed,
                limits=limits,
                errors=dict(errors),
            )
            return
        parts = [
            f"{tally.rows:,}/{self._total:,} rows",
            f"{tally.output_tokens / elapsed:,.0f} tok/s",
            f"{row_rate:,.1f} rows/s",
            "cache " + ("not reported" if hits is None else f"{hits:.0%}"),
            f"in flight ≤ {sum(limits.values())}",
            "left " + ("?" if left_s is None else _duration(left_s)),
        ]
        if errors:
            parts.append("errors " + ", ".join(f"{kind} {count}" for kind, count in sorted(errors.items())))
        if tally.rejected or tally.failed:
            parts.append(f"rejected {tally.rejected}, failed {tally.failed}")
        line = " · ".join(parts)
        self._write(f"\r\x1b[K{line}" if self._live else line + "\n")

    def finish(self) -> None:
        """End the line on a terminal."""
        if self._live:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
