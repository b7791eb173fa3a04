"""What a log says is in effect: pool sizes, limits, what the server rewrote of what it was asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from forebay.servers.log_patterns.lines import LogLine, parse_segments
from forebay.servers.log_patterns.pattern import Grammar, SettingPattern
from forebay.servers.log_patterns.tracker import GRAMMARS
from forebay.sizes import GB, GIB

__all__ = ["EffectiveSetting", "asked_settings", "effective_settings", "settings_of_line"]

Value = int | float | str

_ASKED = re.compile(r"^(?:server_args=|non-default args: )[^{]*(?P<body>\{.*)")
_PAIR = re.compile(r"'(?P<key>\w+)': (?P<value>'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^,{}\[\]]+)")
_ASKED_OLD = re.compile(r"^server_args=ServerArgs\((?P<body>.*)")
_PAIR_OLD = re.compile(r"(?P<key>\w+)=(?P<value>'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^,()\[\]]+)")


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One setting in effect. ``value`` is bytes where the name ends in ``_bytes``, a count of tokens in ``_tokens``.

    ``ranks`` counts the ranks that reported it; for a ``per_rank`` setting the total is ``value`` x ``ranks``.
    """

    name: str
    value: Value
    per_rank: bool
    ranks: int
    line: int
    text: str


def effective_settings(lines: Iterable[str], server: str | None = None) -> dict[str, EffectiveSetting]:
    """Read the settings in effect out of a log.

    Args:
        lines: the log's lines, in order; the last word of each setting counts.
        server: whose log it is; None tries all grammars.

    Returns:
        name -> setting: ``device_pool_tokens``, ``device_pool_bytes``, ``host_pool_tokens``, ``host_pool_bytes``,
        ``context_tokens``, ``weights_bytes``, ``max_running_count``, ``kv_dtype``, ``address`` and more, as the log has
        them.
    """
    grammars = [GRAMMARS[server]] if server in GRAMMARS else list(GRAMMARS.values())
    found: dict[str, EffectiveSetting] = {}
    ranks: dict[str, set[int | None]] = {}
    for number, raw in enumerate(lines, 1):
        for line in parse_segments(number, raw.rstrip("\n")):
            for grammar in grammars:
                for setting in settings_of_line(grammar, line):
                    seen = ranks.setdefault(setting.name, set())
                    seen.add(line.rank)
                    found[setting.name] = EffectiveSetting(
                        setting.name, setting.value, setting.per_rank, len(seen), setting.line, setting.text
                    )
    return found


def settings_of_line(grammar: Grammar, line: LogLine) -> list[EffectiveSetting]:
    """The settings that one line states."""
    result = []
    for pattern in grammar.settings:
        match = pattern.pattern.search(line.text)
        if match:
            result.extend(_settings(pattern, match, line))
    return result


def asked_settings(line: LogLine) -> dict[str, str]:
    """What the server was asked for, from its own line (``server_args=…``, ``non-default args: …``);
    values as printed.
    """
    for start, pair in ((_ASKED, _PAIR), (_ASKED_OLD, _PAIR_OLD)):
        match = start.match(line.text)
        if match:
            return {found["key"]: found["value"].strip("'\" ") for found in pair.finditer(match["body"])}
    return {}


def _settings(pattern: SettingPattern, match: re.Match[str], line: LogLine) -> list[EffectiveSetting]:
    result = []
    for group, text in match.groupdict().items():
        if text is None:
            continue
        name, value = _read(group, text)
        result.append(EffectiveSetting(name, value, pattern.per_rank, 1, line.number, line.full))
    return result


def _read(group: str, text: str) -> tuple[str, Value]:
    if group.endswith(("_tokens", "_count")):
        return group, int(text.replace(",", ""))
    if group.endswith("_gib"):
        return group.removesuffix("_gib") + "_bytes", round(float(text) * GIB)
    if group.endswith("_gb"):
        return group.removesuffix("_gb") + "_bytes", round(float(text) * GB)
    return group, text
