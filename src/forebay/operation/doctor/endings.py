"""Logs whose end says nothing by itself: an error that no rule knows, a process that ends without a word, a start that stands still."""

from __future__ import annotations

import re
from collections.abc import Iterator

from forebay.causes import Cause
from forebay.operation.doctor.activities import ProcessActivity
from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.evidence_base import EvidenceBase
from forebay.operation.doctor.lifecycle import StartOutcome
from forebay.operation.doctor.records import Confidence, Evidence
from forebay.operation.doctor.rule import Priority
from forebay.operation.doctor.silent_ends import silent_candidates
from forebay.operation.doctor.stalls import stall_candidates
from forebay.servers.log_patterns.common import EXCEPTION, TRACEBACK

__all__ = ["end_candidates", "unexplained"]

_FAILURE_WORDS = re.compile(
    r"\b(?:[Ee]rror|ERROR|[Ff]ail(?:ed|ure|s)?|FAILED|[Ff]atal|FATAL|[Ee]xception|[Aa]bort(?:ed|ing)?|panic(?:ked)?|[Cc]rashed|[Rr]efused|"
    r"[Cc]annot|[Cc]an't|[Cc]ould not|[Uu]nable to|[Dd]enied|[Ii]nvalid|[Uu]nsupported|[Tt]imed? ?out|[Kk]illed|[Uu]nreachable|"
    r"exceeds|No such|not found|not supported|illegal|corrupt(?:ed)?)\b"
)
_SHORTEST = 8  # a line of fewer characters names nothing
_NAMED_ERROR = re.compile(r"\b\w+(?:Error|Exception)\b")
_PASSED_ON = re.compile(
    r"^(?:Received sigquit|SIGQUIT received|Process \S+:$|During handling|The above exception|"
    r"RuntimeError: Engine core initialization failed|Exception: WorkerProc initialization failed|"
    r"Rank \d+ scheduler died|.*\bscheduler died during initialization|.*EngineDeadError|Traceback|.*Exit code: )"
)


def end_candidates(base: EvidenceBase) -> list[Candidate]:
    """Causes read from how the log ends, where it names none: a silent end, then a stall."""
    if base.life.outcome is StartOutcome.STOPPED:
        return []
    if base.life.outcome is StartOutcome.OPEN and not any(True for _ in _failures(base)):
        return [*silent_candidates(base), *stall_candidates(base)]
    return [*silent_candidates(base)]


def unexplained(base: EvidenceBase) -> Candidate | None:
    """``unknown`` for a log that shows a failure, or an error in a start that it does not show to end; else None."""
    life, transcript = base.life, base.transcript
    if life.outcome is StartOutcome.STOPPED or (life.outcome is StartOutcome.OPEN and life.came_up):
        return None
    index = next(_failures(base), None)
    if index is None and life.outcome is not StartOutcome.FAILED:
        return None
    evidence: list[Evidence] = []
    if index is not None:
        index = _exception_of(base, index)
        evidence.append(transcript.evidence(index))
        frame = _last_frame(base, index)
        if frame is not None:
            evidence.append(transcript.evidence(frame))
    return Candidate(
        Cause.UNKNOWN,
        Priority.SECONDARY,
        (0.0,),
        _meaning(base, index),
        _advice(base, index),
        tuple(evidence),
        index=index,
        confidence=Confidence.UNKNOWN,
    )


def _failures(base: EvidenceBase) -> Iterator[int]:
    """Lines that speak of a failure and that nothing known explains, in the order of the log; ERROR lines and exceptions first."""
    harmless = {match.index for match in base.events.get("harmless", ())}
    weak: list[int] = []
    passed_on: list[int] = []
    for index, entry in enumerate(base.transcript.entries):
        text = entry.line.text
        if (
            index in harmless
            or "kill_process_tree called" in text
            or entry.frame
            or len(text.strip()) < _SHORTEST
            or not base.life.may_fail(index)
        ):
            continue
        if _PASSED_ON.match(text):
            passed_on.append(index)
            continue
        says_error = entry.line.level in ("ERROR", "CRITICAL") or EXCEPTION.match(text) or "hit an exception" in text
        if says_error or (
            entry.error and not entry.line.level and (_FAILURE_WORDS.search(text) or _NAMED_ERROR.search(text))
        ):
            yield index
        elif entry.line.level == "WARNING" and re.search(r"\bfailed\b|\bFailed\b|[Ee]rror\b", text):
            weak.append(index)
    yield from passed_on
    yield from weak


def _exception_of(base: EvidenceBase, index: int) -> int:
    """The exception that the report at ``index`` ends in: of a chain the first, which is where it began."""
    entries = base.transcript.entries
    entry = entries[index]
    if EXCEPTION.match(entry.line.text):
        return index
    header = entry.line.text.rstrip().endswith("Traceback (most recent call last):") or TRACEBACK.search(
        entry.line.text
    )
    if entry.block < 0 or not (header or entry.fatal):
        return index
    for at in range(index, min(index + 400, len(entries))):
        if entries[at].block == entry.block and EXCEPTION.match(entries[at].line.text):
            return at
    return index


def _last_frame(base: EvidenceBase, index: int) -> int | None:
    """The last frame line of the report that ``index`` belongs to."""
    entries = base.transcript.entries
    block = entries[index].block
    if block < 0:
        return None
    found = [at for at in range(max(0, index - 200), min(index + 200, len(entries))) if entries[at].block == block]
    files = [at for at in found if entries[at].line.text.lstrip().startswith("File ")]
    return files[-1] if files else None


def _meaning(base: EvidenceBase, index: int | None) -> str:
    if index is None:
        return "It failed, and the log does not say why: no line of it names an error."
    line = base.transcript.entries[index].line
    activity = base.activity_at(index)
    where = "" if activity is ProcessActivity.UNKNOWN else f" while {activity.value}"
    rank = "" if line.rank is None else f" on rank {line.rank}"
    what = (
        "The first error that nothing known explains"
        if not _is_cut(base, index)
        else "The traceback is cut before its last line; its head"
    )
    return f"No rule knows this failure. {what} is line {line.number}{rank}{where}."


def _is_cut(base: EvidenceBase, index: int) -> bool:
    text = base.transcript.entries[index].line.text
    return bool(TRACEBACK.search(text) or text.rstrip().endswith("Traceback (most recent call last):"))


def _advice(base: EvidenceBase, index: int | None) -> str:
    if index is None:
        return "look at the other ranks' logs, the exit code and the kernel log (`--exit-code`, `--kernel-log`): one of them may name the cause"
    if _is_cut(base, index):
        return "the lines that follow the cut name the error: give the whole log, or the other ranks' logs"
    return "read the evidence lines; the logs of the other ranks, the exit code and the kernel log (`--exit-code`, `--kernel-log`) may say more"
