"""One raw log line into who said it, when, how loudly, and what.

A server's line reaches a file through tqdm, ANSI colours, Docker, Kubernetes, journald, srun or torchrun. All of that
is taken off here, so that the tables in this package match only what the server itself wrote.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["MAX_LINE_CHARS", "LogLine", "parse_line", "parse_segments", "segments"]

MAX_LINE_CHARS = 16_384
"""What is read of one line; configuration dumps are the longest lines worth reading."""

_MAX_TEXT = 4_096  # what patterns are tried on; messages with numbers are shorter
_MAX_WORD = 1_024  # a line without a blank for so long is no message
_DUMPS = ("server_args=", "non-default args", "Initializing a")

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BLANKS = re.compile(r"[ \t\xa0]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

# What carries a line: tried from the left until none fits.
_CARRIERS = (
    re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d) (?:stdout|stderr) [FP] "),  # CRI
    re.compile(
        r"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)[ \t]"
    ),  # docker -t, kubectl
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w.@/-]+(?:\[\d+\])?: "),  # journald, syslog
    re.compile(r"\[pod/[\w./-]+\] "),  # kubectl logs --prefix
    re.compile(r"[A-Za-z0-9][\w.-]*\s*\| (?!\d+/\d+ \[)"),  # docker compose
    re.compile(r"\[(?:default|rank)(?P<rank>\d+)\]:\s?"),  # torchrun
    re.compile(r"(?P<rank_>\d{1,4}): "),  # srun --label
)
_COMPACT = re.compile(r"(?P<level>TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\s+(?P<target>[\w.:]+): ")  # Dynamo

_SGLANG = re.compile(
    r"\[(?:(?:\d{4}-)?(?P<month>\d\d)-(?P<day>\d\d) )(?P<clock>\d\d:\d\d:\d\d)(?:[.,]\d+)?"
    r"(?P<ranks>(?: (?:DP|TP|PP|EP|CP|ATTN_\w+?)\d+)*)\] ?"
)
_VLLM_PROCESS = re.compile(
    r"\((?P<process>APIServer|EngineCore|Worker|VllmWorker|RayWorker|RayWorkerWrapper|EngineCoreActor|ApiServer|Process|DPCoordinator|Engine|CoreEngine)"
    r"(?P<detail>[\w-]*)(?: rank=(?P<rank>\d+))? pid=(?P<pid>\d+)(?:, ip=[\w.:]+)?\) ?"
)
_VLLM_STAMP = re.compile(
    r"(?:\[[\w-]+\] )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(?:\d{4}-)?(?P<month>\d\d)-(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)(?:[.,]\d+)? "
    r"\[?(?P<origin>(?:\.\.\.)?[\w./-]+?(?::\d+)?)\] ?"
)
_LMCACHE = re.compile(
    r"(?:\[\d{4}-(?P<month>\d\d)-(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)[.,]?\d*\] )?"
    r"LMCache (?P<level>DEBUG|INFO|WARNING|ERROR): "
)
_UVICORN = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):(?: {2,}|\t| (?=\S+:\d+ - ))")
_LOGGING = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):(?P<origin>[\w.]+):")
_GLOG = re.compile(
    r"(?P<letter>[IWEF])(?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.\d+\s+\d+ (?P<origin>[\w./-]+:\d+)\] ?"
)
_TORCH = re.compile(
    r"\[(?P<letter>[IWEF])(?P<month>\d{1,2})(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.\d+ (?P<origin>[\w./-]+:\d+)\] ?"
)
_EMBEDDED = re.compile(
    r"\d{4}-(?P<month>\d\d)-(?P<day>\d\d)T(?P<clock>\d\d:\d\d:\d\d)\.\d+Z (?P<level>INFO|WARNING|ERROR) "
    r"(?=[a-z][\w-]*(?: [\w-]+=|$))"
)
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_RANK_WORD = re.compile(r"(?:TP|rank=?|worker[-_]?)(\d+)", re.IGNORECASE)
_PREFIX_WINDOW = 200  # a carrier unknown to us may stand before the server's own prefix


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line, taken apart.

    Attributes:
        number: line of the file, counted on LF, from 1.
        text: what was said, without prefixes and colours; runs of blanks are one blank, the indentation stays.
        full: the whole line without colours, for showing.
        process: ``front``, ``engine`` or ``worker``; empty where the line does not say.
        name: the process as the log names it (``Worker_TP1``), or empty.
        rank: tensor-parallel rank or worker index; None where the line does not say.
        level: ``INFO``, ``WARNING``, ``ERROR``, ``CRITICAL``, ``DEBUG``, or empty where the line does not say.
        time_s: seconds since the start of the year by the server's clock; None where the line has no time.
        origin: source file of the message (``core.py:1510``), or empty.
        dialect: whose prefix it carries: ``sglang``, ``vllm``, ``lmcache``, ``embedded``, ``uvicorn``, ``glog``, or
            empty.
    """

    number: int
    text: str
    full: str
    process: str = ""
    name: str = ""
    rank: int | None = None
    level: str = ""
    time_s: float | None = None
    origin: str = ""
    dialect: str = ""


def segments(raw: str) -> list[str]:
    """The visible states of a line that a progress bar redrew with carriage returns; empty ones left out."""
    if "\r" not in raw:
        return [raw] if raw else []
    return [part for part in raw.split("\r") if part.strip()]


def parse_segments(number: int, raw: str) -> list[LogLine]:
    """All redrawn states of line ``number``, each parsed; usually one."""
    return [parse_line(number, part) for part in segments(raw[:MAX_LINE_CHARS])]


def parse_line(number: int, raw: str) -> LogLine:
    """Take one line apart. Never fails: what is not understood stays in ``text``."""
    shown = raw[:MAX_LINE_CHARS]
    if "\x1b" in shown:
        shown = _ANSI.sub("", shown)
    shown = _CONTROL.sub("", shown)
    if shown.startswith('{"time":'):
        shown = _event_text(shown)
    docker = _docker_json(shown)
    if docker is not None:
        shown = docker
    embedded = _EMBEDDED.match(shown)
    if embedded:
        return _embedded(number, shown, embedded)
    text, rank = _strip_carriers(shown)
    text, shown = text.rstrip(), shown.rstrip()
    if len(text) > _MAX_WORD and " " not in text[:_MAX_WORD]:
        text = text[:200]
    embedded = _EMBEDDED.match(text)
    if embedded:
        return _embedded(number, text, embedded)
    return _server_prefix(number, shown, text, rank)


def _event_text(text: str) -> str:
    """The embedded server's JSON line in its text form."""
    try:
        record = json.loads(text)
        head = [record.pop("time"), record.pop("level"), record.pop("event")]
    except (ValueError, KeyError, AttributeError):
        return text
    pairs = (
        f"{key}={value if isinstance(value, (int, float)) else json.dumps(value)}" for key, value in record.items()
    )
    return " ".join([*map(str, head), *pairs])


def _docker_json(text: str) -> str | None:
    if not (text.startswith('{"log":') and text.endswith("}")):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    inner = record.get("log") if isinstance(record, dict) else None
    return _ANSI.sub("", inner).rstrip() if isinstance(inner, str) else None


def _strip_carriers(text: str) -> tuple[str, int | None]:
    rank: int | None = None
    for _ in range(4):
        for carrier in _CARRIERS:
            if carrier.groupindex.get("stamp") and _EMBEDDED.match(text):
                return text, rank
            found = carrier.match(text)
            if found:
                groups = found.groupdict()
                number = groups.get("rank") or groups.get("rank_")
                rank = int(number) if number else rank
                text = text[found.end() :]
                break
        else:
            return text, rank
    return text, rank


def _single_blanks(text: str) -> str:
    """Each run of blanks as one, behind the indentation: tables match a message however its words are spaced."""
    if "  " not in text and "\t" not in text and "\xa0" not in text:
        return text
    indentation = text[: len(text) - len(text.lstrip(" \t"))]
    return indentation + _BLANKS.sub(" ", text[len(indentation) :])


def _embedded(number: int, shown: str, found: re.Match[str]) -> LogLine:
    text = _single_blanks(shown[found.end() :])
    rank = re.search(r" rank=(\d+)", text)
    return LogLine(
        number=number,
        text=text,
        full=shown,
        process="worker" if rank else "front",
        rank=int(rank[1]) if rank else None,
        level=found["level"],
        time_s=_seconds(found),
        dialect="embedded",
    )


def _server_prefix(number: int, shown: str, text: str, rank: int | None) -> LogLine:
    process = name = level = origin = dialect = ""
    time_s: float | None = None
    window = text[:_PREFIX_WINDOW]
    found = _SGLANG.search(window) or _VLLM_PROCESS.search(window)
    if found and found.re is _SGLANG:
        dialect, time_s = "sglang", _seconds(found)
        name = found["ranks"].strip()
        rank = _rank_of(name, rank)
        process = "worker" if name else ""
        text = text[found.end() :]
    elif found:
        text, process, name, rank = _vllm_process(text, rank)
        dialect = "vllm"
    for pattern, kind in _STAMPS:
        stamp = pattern.match(text)
        if not stamp:
            continue
        groups = stamp.groupdict()
        level = groups.get("level") or _LETTERS[groups["letter"]]
        level = "WARNING" if level == "WARN" else level
        origin = groups.get("origin") or groups.get("target") or ""
        if groups.get("clock"):
            time_s = _seconds(stamp)
        dialect = dialect or kind
        text = text[stamp.end() :]
        if kind != "uvicorn":
            break
    if len(text) > _MAX_TEXT and not text.startswith(_DUMPS):
        text = text[:_MAX_TEXT]
    return LogLine(number, _single_blanks(text), shown, process, name, rank, level, time_s, origin, dialect)


_STAMPS = (
    (_VLLM_STAMP, "vllm"),
    (_LMCACHE, "lmcache"),
    (_UVICORN, "uvicorn"),
    (_GLOG, "glog"),
    (_TORCH, ""),
    (_LOGGING, ""),
    (_COMPACT, ""),
)


def _vllm_process(text: str, rank: int | None) -> tuple[str, str, str, int | None]:
    process = name = ""
    while True:
        found = _VLLM_PROCESS.search(text[:_PREFIX_WINDOW])
        if not found:
            return text, process, name, rank
        name = found["process"] + found["detail"]
        kind = found["process"].lower()
        process = "front" if kind.startswith("api") else "worker" if "worker" in kind else "engine"
        if kind == "process":
            process = ""
        rank = int(found["rank"]) if found["rank"] else _rank_of(name, rank)
        text = text[found.end() :]


def _rank_of(name: str, fallback: int | None) -> int | None:
    found = _RANK_WORD.search(name)
    return int(found[1]) if found else fallback


def _seconds(found: re.Match[str]) -> float | None:
    groups = found.groupdict()
    if not groups.get("clock"):
        return None
    hours, minutes, seconds = (int(part) for part in groups["clock"].split(":"))
    days = (int(groups["month"]) * 31 + int(groups["day"])) if groups.get("month") else 0
    return days * 86_400.0 + hours * 3600 + minutes * 60 + seconds
