"""From logs and records to one answer: the cause and not its consequences, and nothing at all on a log without a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forebay.causes import Cause
from forebay.operation.doctor.activities import ProcessActivity
from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.candidates import find_candidates
from forebay.operation.doctor.endings import end_candidates, unexplained
from forebay.operation.doctor.evidence_base import EvidenceBase, gather
from forebay.operation.doctor.facts import HostFacts, read_launch
from forebay.operation.doctor.launch_sizing import Sizer, launch_to_size
from forebay.operation.doctor.lifecycle import Lifecycle, StartOutcome, read_lifecycle
from forebay.operation.doctor.ranking import choose, confidence_of, runner_up_of
from forebay.operation.doctor.read_log import SourceLog
from forebay.operation.doctor.records import Confidence, Diagnosis, Evidence, Observations, RuledOut
from forebay.operation.doctor.rule import Priority
from forebay.operation.doctor.system_evidence import system_candidates
from forebay.operation.doctor.transcript import Transcript, build

__all__ = ["diagnose"]


def diagnose(
    sources: Sequence[SourceLog],
    observed: Observations | None = None,
    machine: HostFacts | None = None,
    sizer: Sizer | None = None,
) -> Diagnosis:
    """Answer for the logs of one server (several ranks, or the parts of one run) and what the machine says of it.

    Args:
        sources: the logs read, in any order; several are taken for ranks or processes of one server.
        observed: exit code, kernel records and process states, where known.
        machine: memory and GPUs of the machine the logs are from, where known.
        sizer: computes the values that fit this launch on that machine.
    """
    transcript = build(list(sources), observed or Observations())
    launch = read_launch((entry.line for entry in transcript.entries), transcript.asked)
    base = gather(transcript, read_lifecycle(transcript), launch, machine or HostFacts())
    roots, degraded = find_candidates(base)
    roots += system_candidates(transcript, base.life)
    roots.sort(key=lambda candidate: (candidate.priority, *candidate.order))
    answer = _answer(base, roots, degraded)
    launch_asked = launch_to_size(base, Cause(answer.cause)) if answer.cause and sizer is not None else None
    sized = sizer(launch_asked) if launch_asked is not None and sizer is not None else None
    if sized is None:
        return answer
    # one value per flag: where the planner has one for this launch, it stands alone
    return replace(
        answer, fix=f"{answer.fix}; {sized.text}" if sized.fits else f"for this launch on this machine: {sized.text}"
    )


def _answer(base: EvidenceBase, roots: list[Candidate], degraded: list[Candidate]) -> Diagnosis:
    life, transcript = base.life, base.transcript
    chosen = choose(roots, base)
    if chosen is None and life.stopped_while_starting:
        chosen = _stopped(transcript, life)
    if chosen is None and life.outcome is not StartOutcome.STOPPED:
        chosen = next(iter([*degraded, *end_candidates(base)]), None)
    if chosen is None:
        chosen = unexplained(base)
    if chosen is None:
        meaning = _nothing_read(transcript) or life.words
        return Diagnosis(transcript.server, life.came_up, None, meaning, None, life.evidence)
    where = transcript.entries[chosen.index] if chosen.index is not None else None
    activity = base.activity_at(chosen.index) if chosen.index is not None else ProcessActivity.UNKNOWN
    return Diagnosis(
        server=chosen.server if transcript.server == "unknown" and chosen.server else transcript.server,
        came_up=_came_up(life, chosen, roots),
        cause=chosen.cause.value,
        meaning=chosen.meaning,
        fix=chosen.fix,
        evidence=_without_repeats((*chosen.evidence, *life.evidence))[:8],
        confidence=confidence_of(chosen, roots, base) if chosen.cause is not Cause.UNKNOWN else Confidence.UNKNOWN,
        stage="" if activity is ProcessActivity.UNKNOWN else activity.value,
        rank=where.line.rank if where else None,
        others=_others(chosen, roots, degraded),
        runner_up=runner_up_of(chosen, roots, base),
        ruled_out=_ruled_out(chosen, life),
    )


def _came_up(life: Lifecycle, chosen: Candidate, roots: list[Candidate]) -> bool | None:
    """A cause of a failed start in a log that shows no serving means that it did not come up."""
    if life.came_up is None and chosen in roots:
        return False
    if life.came_up is None and chosen.cause in (Cause.ENGINE_HUNG, Cause.HEALTH_STALL):
        return True
    ended = life.outcome is not StartOutcome.OPEN
    if life.came_up is None and ended and chosen.cause in (Cause.STOPPED_ON_REQUEST, Cause.UNKNOWN):
        return False
    return life.came_up


def _others(chosen: Candidate, roots: list[Candidate], degraded: list[Candidate]) -> tuple[str, ...]:
    found = [
        candidate.cause.value
        for candidate in (*roots, *degraded)
        if candidate.priority is Priority.SPECIFIC and candidate.evidence[:1] != chosen.evidence[:1]
    ]
    return tuple(dict.fromkeys(cause for cause in found if cause != chosen.cause.value))


def _ruled_out(chosen: Candidate, life: Lifecycle) -> tuple[RuledOut, ...]:
    found: dict[Cause, RuledOut] = {}
    for cause, why in (*chosen.rules_out, *life.rules_out):
        if cause is not chosen.cause:
            found.setdefault(cause, RuledOut(cause.value, why))
    return tuple(found.values())


def _without_repeats(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    return tuple(dict.fromkeys(evidence))


def _stopped(transcript: Transcript, life: Lifecycle) -> Candidate:
    evidence = life.evidence
    if transcript.stop is not None:
        evidence = (transcript.evidence(transcript.stop),)
    return Candidate(
        Cause.STOPPED_ON_REQUEST,
        Priority.SPECIFIC,
        (0.0,),
        "A signal asked the server to stop before it was ready; errors after that are part of its shutdown.",
        "nothing is broken: start it again, and give it the time that loading takes",
        evidence,
        index=transcript.stop,
        confidence=Confidence.CERTAIN,
    )


def _nothing_read(transcript: Transcript) -> str | None:
    """What to say where no line could be read, so that "nothing wrong" is not said of what is no log; else None."""
    if transcript.entries or any(source.answered for source in transcript.sources):
        return None
    names = ", ".join(source.name for source in transcript.sources)
    return f"There is no line of text to read in {names}: it is empty, or not a log. That says nothing of the server."
