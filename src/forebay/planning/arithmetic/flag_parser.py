"""A server's own flags, read with that server's meaning: names and aliases, units, whole numbers where it wants them.

Flags that are in no table pass through unchanged; those that are must be right, or the server would die on them later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.causes import Cause
from forebay.errors import UsageError
from forebay.sizes import GB, parse_size

__all__ = ["Flag", "Parsed", "parse_flags", "render"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a server.

    Args:
        dest: the server's own name for the setting.
        kind: ``int``, ``count`` (a whole number that may end in k, M...), ``float``, ``text``, ``json``, ``switch``,
            ``size`` (with a unit).
        names: every spelling, the canonical one first.
        choices: the values it takes, where they are few.
        unit: what a number of it means, for messages.
    """

    dest: str
    kind: str
    names: tuple[str, ...]
    choices: tuple[str, ...] = ()
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Flags by destination, and the rest as it was."""

    values: Mapping[str, Any]
    passthrough: tuple[str, ...]


def parse_flags(argv: Sequence[str], table: Sequence[Flag], server: str) -> Parsed:
    """Read ``argv``.

    Raises:
        UsageError: a known flag without its value, or with one the server would refuse.
    """
    names = {name: flag for flag in table for name in flag.names}
    values: dict[str, Any] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, inline = word.partition("=")
        flag = names.get(name) or names.get(name.replace("_", "-"))
        if flag is None:
            rest.append(word)
            if word.startswith("-") and not equals and words and not _is_flag(words[0]):
                rest.append(words.pop(0))
        elif flag.kind == "switch":
            values[flag.dest] = not name.startswith("--no-")
        else:
            if not equals and not words:
                raise UsageError(f"{server} flag {name} needs a value", code=Cause.BAD_FLAG)
            values[flag.dest] = _value(flag, name, inline if equals else words.pop(0), server)
    return Parsed(values, tuple(rest))


def render(flag: Flag, value: Any) -> list[str]:
    """A flag as argv words."""
    if flag.kind == "switch":
        return [flag.names[0]] if value else []
    if flag.kind == "size":
        return [flag.names[0], f"{value // GB}GB" if value % GB == 0 else f"{value}B"]
    if isinstance(value, float) and value.is_integer() and flag.kind != "float":
        value = int(value)
    return [flag.names[0], json.dumps(value) if flag.kind == "json" else f"{value}"]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _value(flag: Flag, name: str, text: str, server: str) -> Any:
    try:
        if flag.kind == "int":
            return int(text)
        if flag.kind == "float":
            return float(text)
        if flag.kind == "count":
            return _count(text)
        if flag.kind == "size":
            return parse_size(text, what=f"{server} flag {name}")
        if flag.kind == "json":
            return json.loads(text)
    except ValueError as error:
        unit = f" ({flag.unit})" if flag.unit else ""
        wanted = {"int": "a whole number", "count": "a whole number", "float": "a number", "json": "JSON"}[flag.kind]
        raise UsageError(f"{server} flag {name}: {text!r} is not {wanted}{unit}", code=Cause.BAD_FLAG) from error
    if flag.choices and text not in flag.choices:
        raise UsageError(f"{server} flag {name}: {text!r} is not one of {', '.join(flag.choices)}", code=Cause.BAD_FLAG)
    return text


def _count(text: str) -> int:
    """``16k`` is 16,000 and ``16K`` 16,384, in SGLang's and vLLM's reading alike."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if match is None:
        raise ValueError(text)
    number = float(match[1]) * _SUFFIX.get(match[2], 1)
    if not match[2] and "." in match[1]:
        raise ValueError(text)
    return round(number)
