"""Which of several possible causes is the cause: by causal order first (what explains what), then by time, then by depth."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.evidence_base import EvidenceBase
from forebay.operation.doctor.records import Confidence, RuledOut
from forebay.operation.doctor.rule import Priority

__all__ = ["choose", "confidence_of", "runner_up_of"]


def choose(roots: Sequence[Candidate], base: EvidenceBase) -> Candidate | None:
    """The cause among ``roots`` (sorted), or None where there is none.

    A specific cause explains general and secondary ones wherever they stand, but for one thing: what is said only after the
    server was lost cannot have caused the loss, when a report that ended the server names a cause of its own.
    """
    if not roots:
        return None
    best = roots[0]
    earlier = [other for other in roots[1:] if _lost_before(other, best, base)]
    return min(earlier, key=lambda other: other.order[1:]) if earlier else best


def _lost_before(other: Candidate, best: Candidate, base: EvidenceBase) -> bool:
    """``other`` is the report that ended the server, and ``best`` was said in another report after that."""
    entries = base.transcript.entries
    if other.index is None or best.index is None or other.priority is Priority.SECONDARY:
        return False
    first, later = entries[other.index], entries[best.index]
    if not first.fatal or first.source != later.source or first.block == later.block or other.index > best.index:
        return False
    apart = (later.line.time_s or 0) - (first.line.time_s or 0)
    return apart > 2 and first.line.process != "front"


def runner_up_of(chosen: Candidate, roots: Sequence[Candidate], base: EvidenceBase) -> RuledOut | None:
    """The next likely cause, and why it is not the cause."""
    other = next((candidate for candidate in roots if candidate.cause is not chosen.cause), None)
    return RuledOut(other.cause.value, _why_not(other, chosen, base)) if other is not None else None


def _why_not(other: Candidate, chosen: Candidate, base: EvidenceBase) -> str:
    if other.index is None or chosen.index is None:
        return "the records of the machine and the log name the chosen cause more directly"
    entries = base.transcript.entries
    mine, its = entries[chosen.index].line, entries[other.index].line
    if chosen.index == other.index:
        return (
            f"both are read from line {its.number}; the chosen one names what failed, this one only the kind of error"
        )
    if other.priority is Priority.SECONDARY > chosen.priority:
        return f"line {its.number} says that something else failed; line {mine.number} says what"
    if other.priority > chosen.priority:
        return f"line {its.number} is a class of failure that line {mine.number} explains"
    if mine.time_s is not None and its.time_s is not None and its.time_s > mine.time_s:
        return f"line {its.number} came {its.time_s - mine.time_s:.0f} s after line {mine.number}"
    if mine.process != its.process:
        return f"line {its.number} was written by a process that only passes on what line {mine.number} reports"
    return f"line {its.number} came after line {mine.number}"


def confidence_of(chosen: Candidate, roots: Sequence[Candidate], base: EvidenceBase) -> Confidence:
    """How sure the choice is: a rule's own confidence, less where another cause is as good or the log is cut."""
    if chosen.confidence is not Confidence.CERTAIN:
        return chosen.confidence
    rivals = {
        other.cause for other in roots if other.priority is chosen.priority and other.confidence is Confidence.CERTAIN
    }
    if len(rivals) > 1:
        return Confidence.LIKELY
    return Confidence.CERTAIN
