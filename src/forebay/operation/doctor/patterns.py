"""Patterns over log lines, compiled from the tables in ``event_patterns/``.

A blank in a pattern matches any run of blanks, so that a message is found however its words are spaced. Each pattern knows
a piece of text that every match must hold (read from the pattern itself); a line without that piece is not searched.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

if sys.version_info >= (3, 11):  # noqa: UP036 - Python 3.10 on a host reached over SSH
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as sre_parser  # type: ignore[attr-defined]
else:
    import sre_constants as sre
    import sre_parse as sre_parser

__all__ = ["EventPattern", "Where", "Wording", "event_patterns", "pattern"]


class Where(StrEnum):
    """Which lines an event pattern is searched in."""

    ERROR = (
        "error"  # exceptions, ERROR lines, crash output; never INFO, WARNING, a server's own messages, or source code
    )
    STACK = "stack"  # the frames of tracebacks: file lines and their code
    ANY = "any"
    ORIGIN = "origin"  # the source file that a line names in its prefix


def pattern(text: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """A compiled pattern in which a blank matches any run of blanks.

    A blank in a character class, an escaped one, and one with a quantifier of its own (``" {2,}"``) stay as written.
    """
    return re.compile(_spread_blanks(text), re.IGNORECASE if ignore_case else 0)


def _spread_blanks(text: str) -> str:
    result: list[str] = []
    in_class = False
    index = 0
    while index < len(text):
        char = text[index]
        if char == "\\":
            result.append(text[index : index + 2])
            index += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            first = re.compile(r"\[\^?\]?").match(text, index)
            result.append(first[0] if first else char)
            index += len(first[0]) if first else 1
            continue
        elif char == " ":
            index += len(text[index:]) - len(text[index:].lstrip(" "))
            quantifier = text[index : index + 1]
            result.append(
                {"?": r"[ \t\xa0]*", "": r"[ \t\xa0]+"}.get(quantifier, " " if quantifier in "*+{" else r"[ \t\xa0]+")
            )
            index += quantifier == "?"
            continue
        result.append(char)
        index += 1
    return "".join(result)


@dataclass(frozen=True, slots=True)
class Wording:
    """One way in which an event is worded.

    Attributes:
        pattern: searched in the text of a line; its named groups are the event's fields.
        literal: lower-case text that every match holds; empty where the pattern has none.
    """

    pattern: re.Pattern[str]
    literal: str

    def find(self, text: str, lowered: str) -> re.Match[str] | None:
        """The first match in ``text``; ``lowered`` is ``text`` in lower case."""
        return self.pattern.search(text) if self.literal in lowered else None


@dataclass(frozen=True, slots=True)
class EventPattern:
    """A row of the tables: an event, where it is looked for, and the wordings known."""

    name: str
    where: Where
    wordings: tuple[Wording, ...]

    def find(self, text: str, lowered: str | None = None) -> re.Match[str] | None:
        """The match of the first wording that is found in ``text``."""
        lowered = text.lower() if lowered is None else lowered
        for wording in self.wordings:
            found = wording.find(text, lowered)
            if found:
                return found
        return None


@cache
def event_patterns() -> Mapping[str, EventPattern]:
    """All rows of ``event_patterns/*.toml``, by name.

    Raises:
        ValueError: a name stands in two tables.
    """
    rows: dict[str, EventPattern] = {}
    folder = files("forebay.operation.doctor") / "event_patterns"
    for table in sorted(folder.iterdir(), key=lambda item: item.name):
        if not table.name.endswith(".toml"):
            continue
        for name, row in tomllib.loads(table.read_text(encoding="utf-8")).items():
            if name in rows:
                raise ValueError(f"{table.name}: the event {name} is defined twice")
            rows[name] = EventPattern(name, Where(row.get("where", "error")), _wordings(row))
    return rows


def _wordings(row: Mapping[str, object]) -> tuple[Wording, ...]:
    texts = row["wordings"]
    assert isinstance(texts, list)
    ignore_case = bool(row.get("ignore_case", False))
    return tuple(
        Wording(compiled := pattern(text, ignore_case=ignore_case), required_literal(compiled)) for text in texts
    )


def required_literal(compiled: re.Pattern[str]) -> str:
    """The longest piece of text (lower case, without blanks) that every match of ``compiled`` holds; empty if there is none."""
    return max(_runs(sre_parser.parse(compiled.pattern, compiled.flags & re.IGNORECASE)), key=len, default="")


def _runs(parsed: Iterable[tuple[object, object]]) -> list[str]:
    """Pieces of text that must stand in every match: literals in a row, also within groups and repeats of at least one."""
    found: list[str] = []
    run = ""
    for operation, argument in parsed:
        if operation is sre.LITERAL and isinstance(argument, int) and argument < 128:
            run += chr(argument).lower()
            continue
        found.append(run)
        run = ""
        if operation is sre.SUBPATTERN:
            found += _runs(argument[-1])  # type: ignore[index]
        elif operation in (sre.MAX_REPEAT, sre.MIN_REPEAT) and argument[0] >= 1:  # type: ignore[index]
            found += _runs(argument[2])  # type: ignore[index]
    found.append(run)
    return [piece for piece in found if piece]
