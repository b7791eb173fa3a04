"""Undoing what a paste did to a log: quoting and indentation of every line, and lines cut at a terminal's width.

The head of the log decides, so that a huge one still streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

__all__ = ["is_pasted", "unwrap_pasted"]

_HEAD = 2_000
_WIDTHS = range(60, 401)
_FULL_LINES = 3  # so many different lines that end at the longest column were cut there
_MOST_PARTS = 400
_QUOTED = re.compile(rb"[ \t>|]+")
_BEGINS = re.compile(
    rb"[\[(]|[IWEF]\d{4} |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|Traceback|RuntimeError|ValueError)\b|\d{4}-\d\d-\d\d|\s+File \"|LMCache "
)
"""How a line of its own begins: one that follows a full line is not its rest."""
_DIGITS = b"0123456789"


def is_pasted(head: bytes) -> bool:
    """Whether the beginning of a log is indented or quoted as a whole, or cut at a terminal's width."""
    lines = head.split(b"\n", _HEAD)[:_HEAD]
    prefix = _common_indentation(lines)
    return bool(prefix) or _width(lines) is not None


def unwrap_pasted(numbered: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The same lines without a common indentation, and put together where they were cut; each keeps its first number."""
    lines = iter(numbered)
    head = list(islice(lines, _HEAD))
    prefix = _common_indentation([raw for _, raw in head])
    plain = ((number, raw.removeprefix(prefix)) for number, raw in chain(head, lines)) if prefix else chain(head, lines)
    width = _width([raw.removeprefix(prefix) for _, raw in head])
    return _joined(plain, width) if width is not None else iter(plain)


def _common_indentation(lines: list[bytes]) -> bytes:
    filled = [raw for raw in lines if raw.strip() and not raw.startswith((b"#", b"```"))]
    if len(filled) < 2:
        return b""
    heads = [found[0] if (found := _QUOTED.match(raw)) else b"" for raw in filled]
    shortest = min(heads, key=len)
    return shortest if all(head.startswith(shortest) for head in heads) else b""


def _width(lines: list[bytes]) -> int | None:
    """The column at which lines were cut; None where none was, or where one line is longer."""
    lengths = [_length(raw) for raw in lines]
    longest = max(lengths, default=0)
    if longest not in _WIDTHS:
        return None
    full = {raw.translate(None, _DIGITS) for raw, length in zip(lines, lengths, strict=True) if length == longest}
    return longest if len(full) >= _FULL_LINES else None


def _joined(lines: Iterable[tuple[int, bytes]], width: int) -> Iterator[tuple[int, bytes]]:
    first: int | None = None
    parts: list[bytes] = []
    for number, raw in lines:
        if parts and _BEGINS.match(raw):
            yield first or number, b"".join(parts)
            first, parts = None, []
        first = number if first is None else first
        parts.append(raw.rstrip(b"\r"))
        if _length(raw) != width or len(parts) >= _MOST_PARTS:
            yield first, b"".join(parts)
            first, parts = None, []
    if first is not None:
        yield first, b"".join(parts)


def _length(raw: bytes) -> int:
    return len(raw.rstrip(b"\r").decode("utf-8", "replace"))
