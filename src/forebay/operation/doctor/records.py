"""The records that the doctor is given (Observations) and that it answers with (Diagnosis)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forebay.causes import docs_anchor

__all__ = ["SCHEMA", "Confidence", "Diagnosis", "Evidence", "Observations", "RuledOut"]

SCHEMA = 1

_OOM = re.compile(r"out of memory|oom[-_](?:kill|reaper)", re.IGNORECASE)


class Confidence(StrEnum):
    """How sure an answer is; ``make doctor-score`` measures how often each is right (docs/causes.md)."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line or number that the answer rests on.

    Attributes:
        source: the file, or a record such as ``exit code``, ``kernel log``, ``memory.events``.
        line: the file's line number, counted on LF from 1; None for records that have none.
        text: what stands there, numbers included.
    """

    source: str
    line: int | None
    text: str


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A cause that the evidence looks like, and why it is not that."""

    cause: str
    why: str


@dataclass(frozen=True, slots=True)
class Observations:
    """What the machine says about a run. Everything is optional: None or empty means not known, never "did not happen".

    Attributes:
        server: whose run it is, where the run's record says so.
        exit_code: of the front process; negative for a signal, or 128 + signal as a shell reports it.
        kernel_lines: lines of the kernel log since the run began, oldest first.
        kernel_readable: the kernel log could be read, so that nothing in it means that nothing happened.
        oom_kills: how many times the kernel's memory controller killed in the run's cgroup since it began.
        states: pid -> state letter of /proc (``T`` stopped, ``Z`` zombie).
        names: pid -> what the process is for, for the text.
        pids: the run's processes, the front first.
        stop_requested: this run was asked to stop.
    """

    server: str | None = None
    exit_code: int | None = None
    kernel_lines: tuple[str, ...] = ()
    kernel_readable: bool = False
    oom_kills: int | None = None
    states: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    stop_requested: bool = False

    @property
    def oom_denied(self) -> bool:
        """The kernel's records were read, and they show no kill for want of memory."""
        if self.oom_kills is not None:
            return self.oom_kills == 0
        return self.kernel_readable and not any(_OOM.search(text) for text in self.kernel_lines)

    @property
    def signal(self) -> int | None:
        """The signal that ended the front, where its exit code says one."""
        if self.exit_code is None:
            return None
        if self.exit_code < 0:
            return -self.exit_code
        return self.exit_code - 128 if 128 < self.exit_code <= 128 + 64 else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer.

    Attributes:
        server: ``embedded``, ``sglang``, ``vllm`` or ``unknown``.
        came_up: whether the server served; None where the log does not show it.
        cause: a ``forebay.causes.Cause`` value; None when nothing is wrong.
        meaning: what happened, in one sentence.
        fix: what to change, with the value to try.
        confidence: how sure ``cause`` is.
        stage: where the start was when it failed, in words; empty where the log does not show it.
        rank: the rank whose line the answer rests on; None where the line does not say.
        others: further causes found; each is true as well, and not merely a consequence of ``cause``.
        runner_up: the next likely cause, and why it was not chosen.
    """

    server: str
    came_up: bool | None
    cause: str | None
    meaning: str
    fix: str | None
    evidence: tuple[Evidence, ...] = ()
    confidence: Confidence = Confidence.UNKNOWN
    stage: str = ""
    rank: int | None = None
    others: tuple[str, ...] = ()
    runner_up: RuledOut | None = None
    ruled_out: tuple[RuledOut, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The record behind ``--json``."""
        return {
            "schema": SCHEMA,
            "server": self.server,
            "came_up": self.came_up,
            "cause": self.cause,
            "docs": docs_anchor(self.cause) if self.cause else None,
            "meaning": self.meaning,
            "fix": self.fix,
            "evidence": [{"source": item.source, "line": item.line, "text": item.text} for item in self.evidence],
            "confidence": self.confidence.value,
            "stage": self.stage or None,
            "rank": self.rank,
            "others": list(self.others),
            "runner_up": {"cause": self.runner_up.cause, "why": self.runner_up.why} if self.runner_up else None,
            "ruled_out": [{"cause": item.cause, "why": item.why} for item in self.ruled_out],
        }
