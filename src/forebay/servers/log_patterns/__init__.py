"""Log grammars: a server's lines to stages, error marks and settings in effect. The grammar is data,
tested on real logs.

    lines.py        one raw line -> LogLine: who, when, how loudly, what (carriers such as Docker's or srun's taken off)
    model.py        Stage, and the rows of the tables
    common.py       patterns that the servers share
    embedded.py, sglang.py, vllm.py   one table each
    tracker.py      StageTracker(server).feed(line) -> StageEvent | None
    settings.py     effective_settings(lines) -> {name: EffectiveSetting}
    detect.py       whose log is this

"Ready" is never read from a log: SGLang prints its ready line even when another server owns the port.
"""

from forebay.servers.log_patterns.detect import detect_server
from forebay.servers.log_patterns.lines import LogLine, parse_line, parse_segments
from forebay.servers.log_patterns.pattern import Grammar, Stage, StageEvent
from forebay.servers.log_patterns.settings import EffectiveSetting, asked_settings, effective_settings
from forebay.servers.log_patterns.tracker import GRAMMARS, StageTracker, grammar_for

__all__ = [
    "GRAMMARS",
    "EffectiveSetting",
    "Grammar",
    "LogLine",
    "Stage",
    "StageEvent",
    "StageTracker",
    "asked_settings",
    "detect_server",
    "effective_settings",
    "grammar_for",
    "parse_line",
    "parse_segments",
]
