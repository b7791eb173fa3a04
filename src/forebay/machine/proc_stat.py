"""The one line of /proc/PID/stat, parsed (a process's name may hold spaces and brackets)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProcStat", "parse_stat"]


@dataclass(frozen=True, slots=True)
class ProcStat:
    """Fields of proc(5), in kernel units (ticks, pages)."""

    name: str
    state: str
    ppid: int
    pgid: int
    sid: int
    cpu_ticks: int
    threads: int
    start_ticks: int
    rss_pages: int


def parse_stat(text: str) -> ProcStat:
    """Parse ``/proc/PID/stat``."""
    before, _, after = text.rpartition(")")
    fields = after.split()
    return ProcStat(
        name=before.partition("(")[2],
        state=fields[0],
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
    )
