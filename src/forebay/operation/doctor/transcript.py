"""The lines of all sources, with what they show of the server's life: did it come up, was it stopped,
what was lost when.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from forebay.operation.doctor.read_log import Kept, SourceLog
from forebay.operation.doctor.records import Evidence, Observations
from forebay.servers.log_patterns import EffectiveSetting, LogLine, Stage, StageTracker, asked_settings, detect_server
from forebay.servers.log_patterns.common import EXCEPTION, TRACEBACK
from forebay.servers.log_patterns.pattern import ErrorMark, Grammar
from forebay.servers.log_patterns.settings import settings_of_line
from forebay.servers.log_patterns.tracker import GRAMMARS

__all__ = ["Transcript", "TranscriptLine", "build"]

_QUIET = re.compile(
    r"^(?:\S+:\d+: )?\w*Warning: |^\s*warnings\.warn|^(?:WARNING|INFO|DEBUG|WARN)\b|\bNCCL (?:INFO|TRACE)\b|^\s*\^+$|^Ignore import error"
)
_CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_STOP = re.compile(
    r"^\[shutdown\] API server: shutdown triggered|^KeyboardInterrupt\b|^SIGTERM received\.|^Gracefully exiting\.\.\.|"
    r"^(?:Received|Caught|Got) (?:signal )?(?:SIGTERM|SIGINT)\b|^signal_received\b|^stopping\b.*\b(?:reason=\"?(?:signal|SIG)|signal=SIG)"
)
_STOP_PASSED_ON = re.compile(
    r"^\[shutdown\] EngineCore: trigger received signal=SIG(?:TERM|INT)|^\[shutdown\] WorkerProc: terminated by"
)
_LAUNCH = re.compile(r"^(?:server_args=|non-default args: )")
_BLOCK_LINES = 400
_CODE = re.compile(r"^\s+")
_FRAME = re.compile(r"^\s*File \"[^\"]+\", line \d+|^ {4,}\S|^ {2,}\^+$")


@dataclass(slots=True)
class TranscriptLine:
    """A kept line in its place.

    Attributes:
        source: index of its file; served: requests answered with tokens before it.
        block: number of the traceback or error report it belongs to, or -1.
        error: it stands where errors stand (``Where.ERROR``); frame: it is a frame of a traceback (``Where.STACK``).
        fatal: it belongs to a report after which the server was lost.
        stage: the furthest stage that its rank (where the line does not name one: any rank) had shown.
    """

    line: LogLine
    source: int
    served: int
    block: int = -1
    error: bool = False
    frame: bool = False
    fatal: bool = False
    stage: Stage | None = None


@dataclass(slots=True)
class Transcript:
    """Everything the rules may look at."""

    sources: list[SourceLog]
    server: str
    observed: Observations
    entries: list[TranscriptLine] = field(default_factory=list)
    settings: dict[str, EffectiveSetting] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    stages: dict[int, Stage] = field(default_factory=dict)
    """Per source: the furthest stage."""
    advances: list[tuple[int, int | None]] = field(default_factory=list)
    """(index of entry, rank) of each line that showed a new stage or progress."""
    up: int | None = None
    """Index of the entry that shows it serving; see ``answered`` for request lines."""
    stop: int | None = None
    fatal: int | None = None
    port_lost: bool = False

    @property
    def answered(self) -> bool:
        """Some request was answered with tokens."""
        return any(source.served for source in self.sources)

    @property
    def has_served(self) -> bool:
        """It had come up: it said so on a port of its own, or answered with tokens."""
        return self.up is not None or self.answered

    def evidence(self, index: int) -> Evidence:
        """The entry as evidence."""
        entry = self.entries[index]
        return Evidence(self.sources[entry.source].name, entry.line.number, entry.line.full.strip()[:1000])

    def search(self, wanted: re.Pattern[str], indices: Iterable[int] | None = None) -> int | None:
        """Index of the first entry (of ``indices``, or all) whose text ``wanted`` is found in."""
        for index in range(len(self.entries)) if indices is None else indices:
            if wanted.search(self.entries[index].line.text):
                return index
        return None

    def block_of(self, index: int) -> Sequence[int]:
        """The entries of the same report; around a line outside any report, its near neighbours of the same source."""
        block = self.entries[index].block
        if block >= 0:
            return [
                i
                for i in range(max(0, index - _BLOCK_LINES), min(len(self.entries), index + _BLOCK_LINES))
                if self.entries[i].block == block
            ]
        source = self.entries[index].source
        return [
            i for i in range(max(0, index - 12), min(len(self.entries), index + 13)) if self.entries[i].source == source
        ]

    def survived(self, index: int) -> bool:
        """After this entry the server went on: it made progress, or answered requests, before anything was lost."""
        entry = self.entries[index]
        if entry.fatal:
            return False
        end = self.fatal if self.fatal is not None and self.fatal > index else len(self.entries)
        served_then = self.entries[end].served if end < len(self.entries) else self.sources[entry.source].served
        if served_then > entry.served and end > index:
            return True
        rank = entry.line.rank
        if rank is None and len(self.ranks) > 1 and not entry.line.dialect:
            # one of several ranks wrote it, and it is not known which: only the whole server's coming up tells that it went on
            return self.up is not None and index < self.up < end
        return any(index < at < end and self._same(at, entry, rank, who) for at, who in self.advances)

    def _same(self, at: int, entry: TranscriptLine, rank: int | None, who: int | None) -> bool:
        return self.entries[at].source == entry.source and (rank is None or who is None or rank == who)

    def bytes_setting(self, name: str) -> int | None:
        """A setting in effect as a number, or None."""
        found = self.settings.get(name)
        return int(found.value) if found is not None and isinstance(found.value, (int, float)) else None


def build(sources: list[SourceLog], observed: Observations) -> Transcript:
    """Put the sources together and read the server's life from them."""
    attempts = [_last_attempt(source) for source in sources]
    lines = [kept.line for kept_lines in attempts for kept in kept_lines]
    samples = [line for source in sources for line in (source.first_answer, *source.stats) if line is not None]
    server = observed.server or detect_server([*lines, *samples])
    transcript = Transcript(sources, server, observed)
    grammars = [GRAMMARS[server]] if server in GRAMMARS else [GRAMMARS["sglang"], GRAMMARS["vllm"]]
    marks = [mark for grammar in grammars for mark in grammar.errors if mark.pattern.pattern[:4] != "^(?!"]
    for number, kept_lines in enumerate(attempts):
        _add_source(transcript, number, kept_lines, grammars[0], marks)
    _read_life(transcript)
    for entry in transcript.entries:
        _read_settings(transcript, grammars, entry.line)
    return transcript


def _last_attempt(source: SourceLog) -> list[Kept]:
    """The lines of the last start, where one file holds several (a restarted container, ``>>``)."""
    launches = [
        i for i, kept in enumerate(source.kept) if _LAUNCH.match(kept.line.text) and kept.line.process in ("", "front")
    ]
    if len(launches) < 2:
        return source.kept
    before, last = source.kept[launches[-2]], source.kept[launches[-1]]
    ended = any(_is_end(kept.line) for kept in source.kept[launches[-2] : launches[-1]])
    apart = before.line.time_s is None or last.line.time_s is None or last.line.time_s - before.line.time_s > 1
    return source.kept[launches[-1] :] if ended and apart else source.kept


def _is_end(line: LogLine) -> bool:
    text = line.text
    return bool(
        _STOP.search(text)
        or "kill_process_tree called" in text
        or text.startswith(("Received sigquit", "EngineCore failed to start", "EngineCore encountered"))
        or "Engine core initialization failed" in text
        or (not line.dialect and EXCEPTION.match(text))
    )


def _add_source(
    transcript: Transcript, number: int, kept_lines: list[Kept], grammar: Grammar, marks: list[ErrorMark]
) -> None:
    tracker = StageTracker(grammar.server)
    blocks = _Blocks(len(transcript.entries))
    clock: float | None = None
    for kept in kept_lines:
        line = kept.line
        clock = line.time_s if line.time_s is not None else clock
        if line.time_s is None and clock is not None:
            line = _with_time(line, clock)
        entry = TranscriptLine(line, number, kept.served)
        index = len(transcript.entries)
        transcript.entries.append(entry)
        if line.rank is not None:
            transcript.ranks.add(line.rank)
        mark = _mark_of(line, marks)
        entry.block, entry.fatal = blocks.place(entry, mark is not None)
        entry.frame = bool(_FRAME.match(line.text))
        entry.error = not entry.frame and _is_error(line, mark)
        if mark is not None:
            transcript.port_lost = transcript.port_lost or mark.binding
            if transcript.fatal is None:
                transcript.fatal = index
        event = tracker.feed_parsed(line)
        entry.stage = tracker.stage_of_rank(line.rank) if tracker.stage is not Stage.PREFLIGHT else None
        if event is not None and not event.error:
            transcript.advances.append((index, line.rank))
            says_up = event.stage is Stage.SERVING and (line.dialect != "embedded" or line.text.startswith("ready"))
            if says_up and transcript.up is None and not transcript.port_lost:
                transcript.up = index
    transcript.stages[number] = tracker.stage


def _with_time(line: LogLine, time_s: float) -> LogLine:
    return replace(line, time_s=time_s)


def _mark_of(line: LogLine, marks: list[ErrorMark]) -> ErrorMark | None:
    for mark in marks:
        if (not mark.levels or line.level in mark.levels) and mark.pattern.search(line.text):
            return mark
    return None


def _is_error(line: LogLine, mark: ErrorMark | None) -> bool:
    if mark is not None or line.level in ("ERROR", "CRITICAL"):
        return True
    if line.level or line.dialect in ("sglang", "embedded"):
        return False
    return not _QUIET.search(line.text)


class _Blocks:
    """Cuts the lines of one source into reports: a header, a traceback, the exception with its message,
    chained ones.
    """

    def __init__(self, start: int) -> None:
        self._next = start  # numbers stay unique over the sources
        self._open: dict[tuple[str, str], _Block] = {}

    def place(self, entry: TranscriptLine, is_mark: bool) -> tuple[int, bool]:
        """The block a line belongs to (-1: none), and whether that block ended the server."""
        line = entry.line
        prefixed = bool(line.dialect or line.level)
        key = (line.name, line.origin) if line.dialect == "vllm" else ("", "")
        block = self._open.get(key)
        if prefixed and key == ("", ""):
            if block is not None and block.done:
                del self._open[key]
            block = None
        starts = is_mark or bool(TRACEBACK.search(line.text))
        if starts and (block is None or (is_mark and not block.fatal)):
            block = self._open[key] = _Block(self._new(), is_mark)
        if block is None:
            return -1, is_mark
        if not self._continues(block, line, starts):
            self._open.pop(key, None)
            return -1, is_mark
        block.lines += 1
        if EXCEPTION.match(line.text):
            block.done = True
        elif _CHAINED.match(line.text) or starts:
            block.done = False
        return block.number, block.fatal

    def _continues(self, block: _Block, line: LogLine, starts: bool) -> bool:
        if block.lines > _BLOCK_LINES:
            return False
        if line.dialect == "vllm" or starts or not block.done:
            return True
        text = line.text
        return not text.strip() or bool(_CODE.match(text)) or bool(_CHAINED.match(text)) or block.message_goes_on()

    def _new(self) -> int:
        self._next += 1
        return self._next


@dataclass(slots=True)
class _Block:
    number: int
    fatal: bool
    lines: int = 0
    done: bool = False
    after: int = 0

    def message_goes_on(self) -> bool:
        """A message may have some lines of its own."""
        self.after += 1
        return self.after <= 12


def _read_life(transcript: Transcript) -> None:
    strong: int | None = None
    weak: int | None = None
    for index, entry in enumerate(transcript.entries):
        text = entry.line.text
        if strong is None and _STOP.search(text):
            strong = index
        if weak is None and _STOP_PASSED_ON.search(text):
            weak = index
    first_bare = next((i for i, e in enumerate(transcript.entries) if _unhandled(e)), None)
    if strong is not None:
        transcript.stop = min(strong, weak) if weak is not None else strong
    elif weak is not None and first_bare is None and (transcript.fatal is None or weak < transcript.fatal):
        transcript.stop = weak


def _unhandled(entry: TranscriptLine) -> bool:
    line = entry.line
    return (
        not line.dialect
        and not line.level
        and bool(EXCEPTION.match(line.text))
        and not line.text.startswith(("KeyboardInterrupt", "asyncio"))
    )


def _read_settings(transcript: Transcript, grammars: list[Grammar], line: LogLine) -> None:
    for grammar in grammars:
        for setting in settings_of_line(grammar, line):
            before = transcript.settings.get(setting.name)
            if before is None or not setting.per_rank:
                transcript.settings[setting.name] = setting
    if line.text.startswith(("server_args=", "non-default args")):
        transcript.asked.update(asked_settings(line))
