"""The kernel's own record: out-of-memory kills, crashes, GPU faults. Readable or not is part of the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forebay.machine.interface import Machine

__all__ = ["KernelLine", "KernelLog", "read_kernel_log"]


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line; ``at_s`` is seconds since boot, None where the line carries no time."""

    at_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class KernelLog:
    """The kernel log, or why it could not be read (``unreadable``)."""

    lines: tuple[KernelLine, ...]
    unreadable: str | None = None


def read_kernel_log(machine: Machine, *, since_s: float = 0.0) -> KernelLog:
    """The lines from ``since_s`` (seconds after boot) on, through ``dmesg``."""
    done = machine.run(("dmesg", "--color=never"), timeout_s=5.0)
    if done.exit_code == 127:
        return KernelLog((), "dmesg is not installed")
    if done.exit_code != 0:
        return KernelLog((), (done.stderr.strip().splitlines() or ["dmesg failed"])[-1])
    lines = (_parse(text) for text in done.stdout.splitlines())
    return KernelLog(tuple(line for line in lines if line.at_s is None or line.at_s >= since_s))


def _parse(text: str) -> KernelLine:
    match = re.match(r"\[\s*(\d+\.\d+)\]\s?(.*)", text)
    return KernelLine(float(match[1]), match[2]) if match else KernelLine(None, text)
