"""How long each stage of a start took and what moved in it; compared with earlier starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from forebay.operation.watch.health_state import activity_between
from forebay.operation.watch.observation import Activity
from forebay.runs.run_record import StageTime
from forebay.sizes import format_size

__all__ = ["StageClock", "compare", "seconds_per_stage", "slowest_first", "stage_lines"]

_SLOWER = 2.0
_SLOWER_S = 5.0


class StageClock:
    """Collects stages as they are entered. Times are monotonic seconds."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.done: list[StageTime] = []
        self._name: str | None = None
        self._since = began
        self._at_entry = Activity()

    def enter(self, name: str, at: float, activity: Activity) -> None:
        """``name`` begins; the stage before it ends."""
        if self._name is not None:
            self.done.append(self._finished(at, activity))
        self._name, self._since, self._at_entry = name, at, activity

    def current(self, at: float, activity: Activity) -> tuple[Activity, float]:
        """What moved since the current stage began, and its seconds so far."""
        return activity_between(self._at_entry, activity), at - self._since

    def _finished(self, at: float, activity: Activity) -> StageTime:
        assert self._name is not None
        inside = activity_between(self._at_entry, activity)
        return StageTime(
            self._name,
            round(at - self._since, 2),
            read_bytes=inside.read_bytes,
            grown_bytes=inside.rss_bytes,
            cpu_s=round(inside.cpu_s, 2),
        )


def slowest_first(stages: Iterable[StageTime]) -> list[StageTime]:
    """Stages by time, longest first; a stage entered twice counts once."""
    merged: dict[str, StageTime] = {}
    for stage in stages:
        before = merged.get(stage.name)
        if before is None:
            merged[stage.name] = stage
        else:
            merged[stage.name] = StageTime(
                stage.name,
                round(before.seconds + stage.seconds, 2),
                before.read_bytes + stage.read_bytes,
                before.grown_bytes + stage.grown_bytes,
                round(before.cpu_s + stage.cpu_s, 2),
                before.slower_than_before or stage.slower_than_before,
            )
    return sorted(merged.values(), key=lambda stage: -stage.seconds)


def seconds_per_stage(stages: Iterable[StageTime]) -> dict[str, float]:
    """Stage name -> seconds, a stage entered twice counted once."""
    return {stage.name: stage.seconds for stage in slowest_first(stages)}


def compare(stages: Sequence[StageTime], earlier: Iterable[Mapping[str, float]]) -> list[StageTime]:
    """``stages`` with those marked that took twice as long, and 5 s more, than the median of ``earlier`` starts.

    Args:
        earlier: stage name -> seconds of each earlier start of the same server and model.
    """
    past: dict[str, list[float]] = {}
    for start in earlier:
        for name, seconds in start.items():
            past.setdefault(name, []).append(seconds)
    result = []
    for stage in stages:
        usual = median(past[stage.name]) if stage.name in past else None
        slow = usual is not None and stage.seconds > _SLOWER * usual and stage.seconds > usual + _SLOWER_S
        result.append(
            StageTime(
                stage.name, stage.seconds, stage.read_bytes, stage.grown_bytes, stage.cpu_s, usual if slow else None
            )
        )
    return result


def stage_lines(stages: Iterable[StageTime]) -> list[str]:
    """One line per stage, slowest first, with the bytes read and faulted in per second."""
    lines = []
    for stage in slowest_first(stages):
        rates = []
        if stage.seconds > 0 and stage.read_bytes > 1 << 20:
            rates.append(f"read {format_size(stage.read_bytes / stage.seconds)}/s")
        if stage.seconds > 0 and stage.grown_bytes > 1 << 20:
            rates.append(f"faulted in {stage.grown_bytes / stage.seconds / 1e9:.2f} GB/s")
        rates.append(f"CPU {stage.cpu_s:.1f} s")
        slow = f"  SLOW: {stage.slower_than_before:.1f} s in earlier runs" if stage.slower_than_before else ""
        lines.append(f"  {stage.seconds:8.1f} s  {stage.name:<18} {', '.join(rates)}{slow}")
    return lines
