"""A log file into the lines worth thinking about: streamed, bounded in memory, whatever the file holds.

A serving log is nearly all request lines; those are counted, not kept. Of the rest the first ``KEEP`` lines are kept,
later ones only if they speak of trouble, and a line that repeats (numbers aside) is kept ``REPEATS`` times.
"""

from __future__ import annotations

import gzip
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from forebay.errors import UsageError
from forebay.operation.doctor.unwrap_pasted import unwrap_pasted
from forebay.servers.log_patterns import LogLine, parse_segments
from forebay.servers.log_patterns.lines import MAX_LINE_CHARS

__all__ = ["Kept", "SourceLog", "read_file", "read_lines", "read_text"]

KEEP = 6_000
REPEATS = 64
TAIL = 400
_CHUNK = 1 << 20
_DIGITS = b"0123456789"
_TEMPLATES = 50_000

_TROUBLE = re.compile(
    rb"rror|xception|Traceback|ailed|ailure|atal|bort|illed|OOM|out of memory|died|dead|crash|SIG[A-Z]{3,}|terminated|"
    rb"hutdown|hutting down|refused|denied|No such|not found|annot|an't|ould not|ouldn't|nable to|not supported|nsupported|"
    rb"nvalid|unrecognized|imed out|imeout|Health check|KV [Cc]ache|Allocating|apture|startup|fired up|Interrupt"
)
_REQUEST = re.compile(rb'"(GET|POST|HEAD|PUT|OPTIONS|DELETE) (\S+)[^"]*" (\d{3})')
_GENERATES = re.compile(
    rb"^/(?:generate|v1/(?:chat/)?completions|v1/responses|v1/messages|v1/embeddings|invocations)\b"
)
_STATS = re.compile(rb"Avg prompt throughput: .*Running: \d+")
_BATCH = re.compile(rb"\b(?:Prefill|Decode) batch[.,]")
_NOISE = (b" - leaked ", b"nanobind: ", b"usage: ")
_USAGE = re.compile(rb"\s*\[--")
_CONTROLS = bytes(code for code in range(32) if code not in (9, 10, 13, 27)) + b"\x7f"
_ALARM = re.compile(rb"rror|xcept|raceb|illed|atal|ailed|OOM|of mem|died|Interr|SIG")


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept line, and how many requests had been answered with tokens before it."""

    line: LogLine
    served: int


@dataclass(slots=True)
class SourceLog:
    """What was read of one file.

    Attributes:
        name: the file as the user gave it.
        kept: the lines kept, in order.
        lines: how many lines the file has.
        served: answers 2xx of endpoints that generate; answered: answers 2xx of any endpoint.
        first_answer: the first line that shows an answer 2xx.
        last_stats: the last lines of throughput statistics, as they stand.
        usage_flags: flags in an argparse usage text, for suggesting the right spelling.
        notes: the last head line that was a collector's note, not read.
    """

    name: str
    kept: list[Kept] = field(default_factory=list)
    lines: int = 0
    served: int = 0
    answered: int = 0
    batches: int = 0
    first_answer: LogLine | None = None
    first_served: LogLine | None = None
    last_stats: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=3))
    usage_flags: set[str] = field(default_factory=set)
    notes: int = 0

    @property
    def stats(self) -> list[LogLine]:
        """``last_stats``, parsed."""
        return [
            line for number, raw in self.last_stats for line in parse_segments(number, raw.decode("utf-8", "replace"))
        ]


def read_file(path: Path, *, name: str | None = None) -> SourceLog:
    """Read one log file; a gzip file is read through, and UTF-16 (what PowerShell redirects to) is understood.

    Raises:
        UsageError: it is not there, a folder, or not readable.
    """
    try:
        with path.open("rb") as stream:
            if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
                lines = io.TextIOWrapper(stream, "utf-16", errors="replace", newline="\n")
                return _collect(enumerate((line.rstrip("\n").encode() for line in lines), 1), name or str(path))
            if stream.peek(2)[:2] == b"\x1f\x8b":
                with gzip.open(stream) as inner:
                    return _read(inner, name or str(path))
            return _read(stream, name or str(path))
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"doctor: {path}: {reason}", fix="name a log file, or a run: `forebay status` lists the runs"
        ) from error


def read_text(text: str, name: str = "log") -> SourceLog:
    """The same for a text in memory."""
    return _collect(enumerate((part.encode() for part in text.split("\n")), 1), name)


def _read(stream: IO[bytes] | gzip.GzipFile, name: str) -> SourceLog:
    return _collect(enumerate(_lines(stream), 1), name)


def _lines(stream: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """Lines split on LF; what is over the limit of a line is dropped without being held."""
    carry = b""
    while chunk := stream.read(_CHUNK):
        parts = (carry + chunk).split(b"\n")
        carry = parts.pop()[: 2 * MAX_LINE_CHARS]
        yield from parts
    if carry:
        yield carry


def _collect(numbered: Iterable[tuple[int, bytes]], name: str) -> SourceLog:
    log = SourceLog(name)
    seen: dict[bytes, int] = {}
    tail: deque[tuple[int, bytes, int]] = deque(maxlen=TAIL)
    at_head = True
    for number, raw in unwrap_pasted(numbered):
        log.lines = number
        if at_head:
            if raw.startswith((b"#", b"\xef\xbb\xbf#")):
                log.notes = number
                continue
            at_head = not raw.strip()
        if _routine(log, number, raw):
            continue
        if len(log.kept) >= KEEP and not _ALARM.search(raw, 0, 2000):
            tail.append((number, raw[:MAX_LINE_CHARS], log.served))
            continue
        template = raw[:300].translate(None, _DIGITS)
        count = seen.get(template, 0) + 1
        if count > 1 or len(seen) < _TEMPLATES:
            seen[template] = count
        room = len(log.kept) < KEEP or (len(log.kept) < 2 * KEEP and _TROUBLE.search(raw[:2000]))
        if count <= REPEATS and room and not _is_garbage(raw):
            _keep(log, number, raw, log.served)
        else:
            tail.append((number, raw[:MAX_LINE_CHARS], log.served))
    last = log.kept[-1].line.number if log.kept else 0
    for number, raw, served in tail:
        if number > last and not _is_garbage(raw):
            _keep(log, number, raw, served)
    return log


def _keep(log: SourceLog, number: int, raw: bytes, served: int) -> None:
    text = raw[: 2 * MAX_LINE_CHARS].decode("utf-8", "replace")
    for line in parse_segments(number, text):
        if line.text or line.full:
            log.kept.append(Kept(line, served))


def _is_garbage(raw: bytes) -> bool:
    """Not text: more than a twentieth are control characters."""
    sample = raw[:400]
    return 20 * (len(sample) - len(sample.translate(None, _CONTROLS))) > len(sample)


def _routine(log: SourceLog, number: int, raw: bytes) -> bool:
    """Lines of serving: counted here. True when the line needs no keeping."""
    if b" HTTP/1" in raw:
        if log.first_served is not None and b'" 2' not in raw:
            return _REQUEST.search(raw[:2000]) is not None
        found = _REQUEST.search(raw[:2000])
        if found:
            _count_answer(log, number, raw, found)
            return True
    if b"hroughput" in raw:
        if _STATS.search(raw[:2000]):
            log.last_stats.append((number, raw[:2000]))
            return True
        if _BATCH.search(raw[:400]):
            log.batches += 1
            return True
    if raw.startswith(_NOISE) or b"Route: /" in raw:
        if raw.startswith(b"usage: "):
            log.usage_flags.update(flag.decode() for flag in re.findall(rb"--[a-z][a-z0-9-]+", raw[:4000]))
        return b"error:" not in raw
    if raw[:1] == b" " and _USAGE.match(raw):
        log.usage_flags.update(flag.decode() for flag in re.findall(rb"--[a-z][a-z0-9-]+", raw[:4000]))
        return b"error:" not in raw
    return False


def _count_answer(log: SourceLog, number: int, raw: bytes, found: re.Match[bytes]) -> None:
    if not found[3].startswith(b"2"):
        return
    log.answered += 1
    if log.first_served is not None:
        log.served += found[1] == b"POST" and _GENERATES.match(found[2]) is not None
        return
    if log.first_answer is None:
        log.first_answer = parse_segments(number, raw[:2000].decode("utf-8", "replace"))[0]
    if _GENERATES.match(found[2]) and found[1] == b"POST":
        log.served += 1
        if log.first_served is None:
            log.first_served = parse_segments(number, raw[:2000].decode("utf-8", "replace"))[0]


def read_lines(path: str) -> tuple[str, ...]:
    """A small text file as lines (a saved kernel log).

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return tuple(Path(path).read_text(errors="replace").splitlines())
    except OSError as error:
        raise UsageError(f"doctor: {path}: {error.strerror}", fix="save it with: dmesg > FILE") from error
