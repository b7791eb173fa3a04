"""A log file into the lines worth keeping: streamed, bounded in memory, whatever the file holds.

The head of a file (``HEAD_BYTES``) is read line by line: of it the first ``KEEP`` lines are kept, but for requests, which are
counted. What follows is nearly all request and batch lines; it is searched in large pieces for words of trouble, and only the
lines that have one are taken apart (``scan_log.py``). The last ``TAIL`` lines are always kept. A line that repeats (numbers
aside) is kept ``REPEATS`` times.
"""

from __future__ import annotations

import gzip
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

from forebay.errors import UsageError
from forebay.operation.doctor.scan_log import TROUBLE, scan
from forebay.operation.doctor.unwrap_pasted import is_pasted, unwrap_pasted
from forebay.servers.log_patterns import LogLine, parse_segments
from forebay.servers.log_patterns.lines import MAX_LINE_CHARS

try:
    import zstandard
    from zstandard import ZstdError
except ImportError:  # on a host reached over SSH there is the standard library only
    zstandard = None  # type: ignore[assignment]
    ZstdError = OSError  # type: ignore[assignment,misc]

__all__ = ["KEEP", "TAIL", "Kept", "SourceLog", "read_file", "read_lines", "read_stream", "read_text"]

KEEP = 6_000
REPEATS = 64
TAIL = 400
HEAD_BYTES = 4 << 20
_CHUNK = 4 << 20
_DIGITS = b"0123456789"
_TEMPLATES = 50_000

_REQUEST = re.compile(rb'"(GET|POST|HEAD|PUT|OPTIONS|DELETE) (\S+)[^"]*" (\d{3})')
_GENERATES = re.compile(
    rb"^/(?:generate|v1/(?:chat/)?completions|v1/responses|v1/messages|v1/embeddings|invocations)\b"
)
_STATS = re.compile(rb"Avg prompt throughput: .*Running: \d+")
_BATCH = re.compile(rb"\b(?:Prefill|Decode) batch[.,]")
_NOISE = (b" - leaked ", b"nanobind: ", b"usage: ")
_USAGE = re.compile(rb"\s*\[--")
_CONTROLS = bytes(code for code in range(32) if code not in (9, 10, 13, 27)) + b"\x7f"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


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
        served: answers 2xx of endpoints that generate; answered: answers 2xx of any endpoint. Past the head of a large file
            both are counted only as far as it matters: at least one more after a kept line, where there was one.
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
    """Read one log file; gzip and zstd are read through, and UTF-16 (what PowerShell redirects to) is understood.

    Raises:
        UsageError: it is not there, a folder, or not readable.
    """
    try:
        with path.open("rb") as stream:
            return read_stream(stream, name or str(path))
    except (OSError, EOFError, ZstdError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"doctor: {path}: {reason}", fix="name a log file, or a run: `forebay status` lists the runs"
        ) from error


def read_stream(stream: IO[bytes], name: str) -> SourceLog:
    """The same for an open stream of bytes, such as the standard input."""
    first = stream.read(4)
    rest = _Rejoined(first, stream)
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        lines = io.TextIOWrapper(io.BufferedReader(rest), "utf-16", errors="replace", newline="\n")
        return _Reader(name).read_lines(enumerate((line.rstrip("\n").encode() for line in lines), 1))
    if first[:2] == _GZIP:
        with gzip.open(io.BufferedReader(rest)) as inner:
            return _Reader(name).read_pieces(_pieces(inner))
    if first == _ZSTD:
        if zstandard is None:
            raise UsageError(
                f"doctor: {name} is compressed by zstd, and the Python that reads it has no zstandard package",
                fix="decompress it there: zstd -d",
            )
        with zstandard.ZstdDecompressor().stream_reader(io.BufferedReader(rest), read_across_frames=True) as inner:
            return _Reader(name).read_pieces(_pieces(inner))
    return _Reader(name).read_pieces(_pieces(rest))


def read_text(text: str, name: str = "log") -> SourceLog:
    """The same for a text in memory."""
    return _Reader(name).read_lines(enumerate((part.encode() for part in text.split("\n")), 1))


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes have been read already."""

    def __init__(self, first: bytes, stream: IO[bytes]) -> None:
        self._first, self._stream = first, stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        head, self._first = self._first, b""
        return head + self._stream.read(size)

    def readinto(self, buffer: Any) -> int:
        data = self._first[: len(buffer)]
        self._first = self._first[len(data) :]
        data = data or self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _pieces(stream: Any) -> Iterator[bytes]:
    """Pieces of whole lines; a line of more than a piece is cut, so that memory stays bounded."""
    carry = b""
    while chunk := stream.read(_CHUNK):
        data = carry + chunk
        end = data.rfind(b"\n") + 1
        if end == 0:
            carry = data[: 2 * MAX_LINE_CHARS]
            continue
        yield data[:end]
        carry = data[end:]
    if carry:
        yield carry


class _Reader:
    """Collects what is kept of one source."""

    def __init__(self, name: str) -> None:
        self._log = SourceLog(name)
        self._seen: dict[bytes, int] = {}
        self._tail: deque[tuple[int, bytes, int]] = deque(maxlen=TAIL)
        self._at_head = True

    def read_pieces(self, pieces: Iterator[bytes]) -> SourceLog:
        """The head line by line, the rest by its words; a pasted log (indented, quoted, wrapped) is small: all by line."""
        head = next(pieces, b"")
        if is_pasted(head):
            return self.read_lines(enumerate(_lines(chain([head], pieces)), 1))
        for number, raw in enumerate(_split(head), 1):
            self._line(number, raw)
        last = b""
        for piece in pieces:
            self._scan(piece)
            last = piece
        if last:
            lines = _split(last[-(TAIL * 512) :])[-TAIL:]
            first = self._log.lines - len(lines) + 1
            self._tail.clear()
            self._tail.extend((first + at, raw[:MAX_LINE_CHARS], self._log.served) for at, raw in enumerate(lines))
        return self._finish()

    def read_lines(self, numbered: Iterable[tuple[int, bytes]]) -> SourceLog:
        """All of it line by line."""
        for number, raw in unwrap_pasted(numbered):
            self._line(number, raw)
        return self._finish()

    def _line(self, number: int, raw: bytes) -> None:
        log = self._log
        log.lines = number
        if self._at_head:
            if raw.startswith((b"#", b"\xef\xbb\xbf#")):
                log.notes = number
                return
            self._at_head = not raw.strip()
        if not _routine(log, number, raw):
            self._offer(number, raw)

    def _scan(self, piece: bytes) -> None:
        log = self._log
        base = log.lines
        for hit in scan(piece, counted=log.served > 0):
            log.served += hit.served
            if not hit.is_line:
                continue
            raw = piece[hit.start : hit.end]
            if not _routine(log, base + hit.number, raw):
                self._offer(base + hit.number, raw)
        log.lines = base + piece.count(b"\n") + (not piece.endswith(b"\n"))
        at = piece.rfind(b"Avg prompt throughput: ")
        if at >= 0:
            start, end = piece.rfind(b"\n", 0, at) + 1, piece.find(b"\n", at)
            number = base + piece.count(b"\n", 0, at) + 1
            log.last_stats.append((number, piece[start : end if end >= 0 else len(piece)][:2000]))

    def _offer(self, number: int, raw: bytes) -> None:
        log = self._log
        trouble = TROUBLE.search(raw[:2000]) is not None
        template = raw[:300].translate(None, _DIGITS)
        count = self._seen.get(template, 0) + 1
        if count > 1 or len(self._seen) < _TEMPLATES:
            self._seen[template] = count
        room = len(log.kept) < KEEP or (len(log.kept) < 2 * KEEP and trouble)
        if count <= REPEATS and room and not _is_garbage(raw):
            self._keep(number, raw, log.served)
        else:
            self._tail.append((number, raw[:MAX_LINE_CHARS], log.served))

    def _keep(self, number: int, raw: bytes, served: int) -> None:
        text = raw[: 2 * MAX_LINE_CHARS].decode("utf-8", "replace")
        for line in parse_segments(number, text):
            if line.text or line.full:
                self._log.kept.append(Kept(line, served))

    def _finish(self) -> SourceLog:
        last = self._log.kept[-1].line.number if self._log.kept else 0
        for number, raw, served in self._tail:
            if number > last and not _is_garbage(raw) and not _is_request(raw):
                self._keep(number, raw, served)
        return self._log


def _split(piece: bytes) -> list[bytes]:
    lines = piece.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield from _split(piece)


def _is_garbage(raw: bytes) -> bool:
    """Not text: more than a twentieth are control characters."""
    sample = raw[:400]
    return 20 * (len(sample) - len(sample.translate(None, _CONTROLS))) > len(sample)


def _is_request(raw: bytes) -> bool:
    return (b" HTTP/1" in raw and _REQUEST.search(raw[:2000]) is not None) or _BATCH.search(raw[:400]) is not None


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
