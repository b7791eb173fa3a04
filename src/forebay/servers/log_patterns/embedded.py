"""The embedded server's log: ``time LEVEL event key=value …`` (``forebay/engine/events.py``), so the table is short."""

from __future__ import annotations

import re

from forebay.servers.log_patterns.pattern import ErrorMark, Grammar, SettingPattern, Stage, StagePattern

__all__ = ["EMBEDDED"]


def _stage(stage: Stage) -> StagePattern:
    """``stage rank=0 name="device pool" progress=0.5``; the name is quoted where it holds a space."""
    plain = stage.value.replace(" ", "[ _]")
    return StagePattern(
        stage, re.compile(rf'^stage .*\bname="?{plain}"?(?=\s|$)'
                          r'(?:.*\bprogress=(?P<fraction>[\d.]+))?(?:.*\bdoing=(?P<doing>"[^"]*"|\S+))?'),
    )  # fmt: skip


EMBEDDED = Grammar(
    server="embedded",
    versions="this package's own",
    order=tuple(Stage),
    stages=(
        *(_stage(stage) for stage in Stage),
        StagePattern(Stage.LOADING, re.compile(r'^kernels .*\bmessage=(?P<doing>"[^"]*"|\S+)')),
        StagePattern(Stage.SERVING, re.compile(r"^(?:ready|serving)(?: |$)")),
    ),
    errors=(
        ErrorMark(re.compile(r"^(?:died|refused)\b"), ("ERROR",)),
        ErrorMark(re.compile(r"^forebay: .+ \[[a-z_]+\]$")),
        ErrorMark(re.compile(r"^Error: (?:No such option|Invalid value|Missing |Got unexpected|Option )")),
    ),
    settings=(
        SettingPattern(re.compile(r"\bdevice_pool_tokens=(?P<device_pool_tokens>\d+)")),
        SettingPattern(re.compile(r"\bhost_pool_tokens=(?P<host_pool_tokens>\d+)")),
        SettingPattern(re.compile(r"\bcontext_length=(?P<context_tokens>\d+)")),
    ),
)
