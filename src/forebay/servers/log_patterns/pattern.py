"""The words of a grammar: stages, the rows of its tables, and what a line meant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ErrorMark", "Grammar", "SettingPattern", "Stage", "StageEvent", "StagePattern"]


class Stage(StrEnum):
    """The stages of a start that a log can show. Ready and verified are never read from a log."""

    PREFLIGHT = "preflight"
    LAUNCHED = "launched"
    LOADING = "loading"
    DEVICE_POOL = "device pool"
    HOST_POOL = "host pool"
    CAPTURING = "capturing graphs"
    WARMING_UP = "warming up"
    SERVING = "serving"


@dataclass(frozen=True, slots=True)
class StagePattern:
    """A line that shows a stage.

    Attributes:
        stage: the stage that the line belongs to.
        pattern: searched in the text of a line. Named groups it may have: ``percent``, ``done`` and ``total`` (a
            progress as a count), ``rate`` (as printed, ``10.12s/it``), ``left`` (as printed, ``00:30``), ``doing`` (in
            words).
        detail: what happens within the stage, for people; empty where the stage says it all.
        complete: the line ends the stage's work: its progress is 100 %.
    """

    stage: Stage
    pattern: re.Pattern[str]
    detail: str = ""
    complete: bool = False


@dataclass(frozen=True, slots=True)
class ErrorMark:
    """A line after which the start, or the server, is lost. It need not name the cause.

    Attributes:
        pattern: searched in the text.
        levels: the line must carry one of these levels; empty: any.
        binding: the port could not be taken, so nothing this log says later about serving is true.
    """

    pattern: re.Pattern[str]
    levels: tuple[str, ...] = ()
    binding: bool = False


@dataclass(frozen=True, slots=True)
class SettingPattern:
    """A line that states settings or sizes in effect: named groups are the settings' names.

    A group's suffix says how its text is read: ``_tokens`` and ``_count`` integers (thousands commas allowed), ``_gib``
    and ``_gb`` sizes turned into ``_bytes``, anything else text.
    """

    pattern: re.Pattern[str]
    per_rank: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """What one server's log means.

    Attributes:
        server: ``embedded``, ``sglang`` or ``vllm``.
        versions: the versions whose real logs the tables were tested on, for people.
        order: the stages in the order in which this server goes through them.
        stages: tried in order; the first that matches decides.
        errors: lines that end a start.
        settings: lines that state what is in effect.
    """

    server: str
    versions: str
    order: tuple[Stage, ...]
    stages: tuple[StagePattern, ...]
    errors: tuple[ErrorMark, ...]
    settings: tuple[SettingPattern, ...]


@dataclass(frozen=True, slots=True)
class StageEvent:
    """What one line told about a start.

    Attributes:
        stage: where the process that wrote the line is.
        percent: progress within the stage, 0 to 100; None where the line does not say.
        rank: the rank that wrote it; None where the line does not say.
        error: the line says that the start, or the server, is lost.
        entered: the line is the first to show this stage.
        detail: what happens within the stage, such as ``compiling``.
        rate, left: speed and time left as the server printed them; empty where it did not.
        line: the line's number; text: the line as shown.
    """

    stage: Stage
    percent: float | None
    rank: int | None
    error: bool
    entered: bool
    detail: str
    rate: str
    left: str
    line: int
    text: str
