"""Follows a start line by line: which stage, how far, and whether it is lost."""

from __future__ import annotations

import re

from forebay.servers.log_patterns.common import BARE_EXCEPTION, PROGRAM_FRAME, TRACEBACK
from forebay.servers.log_patterns.embedded import EMBEDDED
from forebay.servers.log_patterns.lines import LogLine, parse_segments
from forebay.servers.log_patterns.pattern import ErrorMark, Grammar, Stage, StageEvent, StagePattern
from forebay.servers.log_patterns.sglang import SGLANG
from forebay.servers.log_patterns.vllm import VLLM

__all__ = ["GRAMMARS", "StageTracker", "grammar_for", "stage_of"]

GRAMMARS: dict[str, Grammar] = {grammar.server: grammar for grammar in (EMBEDDED, SGLANG, VLLM)}


def grammar_for(server: str) -> Grammar:
    """The grammar of ``embedded``, ``sglang`` or ``vllm``.

    Raises:
        KeyError: no such server.
    """
    return GRAMMARS[server]


class StageTracker:
    """Feed it a server's log; it answers with what changed.

    Args:
        server: ``embedded``, ``sglang`` or ``vllm``.
    """

    def __init__(self, server: str) -> None:
        self._grammar = grammar_for(server)
        self._number = 0
        self._rank_stage: dict[int | None, Stage] = {}
        self._traceback = self._uncaught = False
        self.stage = Stage.PREFLIGHT
        """The furthest stage that any rank has shown."""
        self.percent: float | None = None
        """Progress within ``stage``, of the rank that is furthest."""
        self.doing = ""
        """What is done in ``stage`` just now, where the server says so in words of its own."""
        self.error: StageEvent | None = None
        """The first line that said the start, or the server, is lost."""
        self.port_lost = False
        """The port could not be taken: nothing this log says about serving is true."""

    def stage_of_rank(self, rank: int | None) -> Stage:
        """The stage that ``rank`` showed last; where it is not known, the furthest of all."""
        return self._rank_stage.get(rank, self.stage) if rank is not None else self.stage

    def feed(self, line: str) -> StageEvent | None:
        """Read one line of the file, with or without its newline.

        Returns:
            The line's event (of its last state, where a progress bar redrew it), or None for a line that tells nothing
            about the start.
        """
        self._number += 1
        event: StageEvent | None = None
        for part in parse_segments(self._number, line.rstrip("\n")):
            event = self.feed_parsed(part) or event
        return event

    def feed_parsed(self, line: LogLine) -> StageEvent | None:
        """The same for a line already taken apart."""
        mark = self._uncaught_exception(line) or self._error_mark(line)
        if mark is not None:
            self.port_lost = self.port_lost or mark.binding
            event = self._event(line, self._rank_stage.get(line.rank, self.stage), None, error=True)
            self.error = self.error or event
            return event
        found = stage_of(self._grammar, line)
        if found is None:
            return None
        pattern, match = found
        if pattern.stage is Stage.SERVING and self.port_lost:
            return None
        return self._advance(line, pattern, match)

    def _advance(self, line: LogLine, pattern: StagePattern, match: re.Match[str]) -> StageEvent:
        order = self._grammar.order
        percent = _percent(pattern, match)
        entered = order.index(pattern.stage) > order.index(self.stage)
        if entered:
            self.stage, self.percent = pattern.stage, percent
        elif pattern.stage is self.stage and percent is not None:
            self.percent = percent
        if pattern.stage is self.stage:
            self.doing = (match.groupdict().get("doing") or "").strip('"')
        self._rank_stage[line.rank] = pattern.stage
        return self._event(line, pattern.stage, percent, entered=entered, pattern=pattern, match=match)

    def _uncaught_exception(self, line: LogLine) -> ErrorMark | None:
        """The program's last words, said while it still takes its time to exit (SGLang: 1.7 s)."""
        if line.dialect:
            self._traceback = self._uncaught = False
        elif TRACEBACK.match(line.text):
            self._traceback, self._uncaught = True, False
        elif self._traceback:
            self._traceback, self._uncaught = False, bool(PROGRAM_FRAME.match(line.text))
        elif self._uncaught and BARE_EXCEPTION.pattern.match(line.text):
            self._uncaught = False
            return BARE_EXCEPTION
        return None

    def _error_mark(self, line: LogLine) -> ErrorMark | None:
        for mark in self._grammar.errors:
            if mark is BARE_EXCEPTION and (line.dialect or self.stage is Stage.SERVING):
                continue
            if (not mark.levels or line.level in mark.levels) and mark.pattern.search(line.text):
                return mark
        return None

    def _event(
        self,
        line: LogLine,
        stage: Stage,
        percent: float | None,
        *,
        error: bool = False,
        entered: bool = False,
        pattern: StagePattern | None = None,
        match: re.Match[str] | None = None,
    ) -> StageEvent:
        groups = match.groupdict() if match else {}
        return StageEvent(
            stage=stage,
            percent=percent,
            rank=line.rank,
            error=error,
            entered=entered,
            detail=pattern.detail if pattern else "",
            rate=groups.get("rate") or "",
            left=groups.get("left") or "",
            line=line.number,
            text=line.full,
        )


def stage_of(grammar: Grammar, line: LogLine) -> tuple[StagePattern, re.Match[str]] | None:
    """The row of ``grammar`` that ``line`` matches, or None."""
    for pattern in grammar.stages:
        match = pattern.pattern.search(line.text)
        if match:
            return pattern, match
    return None


def _percent(pattern: StagePattern, match: re.Match[str]) -> float | None:
    groups = match.groupdict()
    if groups.get("fraction"):
        return round(100 * float(groups["fraction"]), 1)
    if groups.get("done") and groups.get("total") and int(groups["total"]):
        return round(100 * int(groups["done"]) / int(groups["total"]), 1)
    if groups.get("percent"):
        return float(groups["percent"])
    return 100.0 if pattern.complete else None
