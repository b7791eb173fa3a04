"""From matches to one answer: the cause and not the fallout, and nothing at all on a log without a failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forebay.causes import Cause
from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.fixes import fill
from forebay.operation.doctor.life import Lifecycle, StartOutcome, read_lifecycle
from forebay.operation.doctor.machine_side import machine_candidates
from forebay.operation.doctor.reading import SourceLog
from forebay.operation.doctor.records import Diagnosis, Evidence, Observations, RuledOut
from forebay.operation.doctor.rule import Found, Kind, Need, Priority, Rule, Where
from forebay.operation.doctor.rules import RULES
from forebay.operation.doctor.transcript import Transcript, build
from forebay.servers.log_patterns.common import EXCEPTION

__all__ = ["diagnose"]

_DEPTH = {"worker": 0, "engine": 1, "": 2, "front": 3}
_NEVER = -1.0


def diagnose(sources: Sequence[SourceLog], observed: Observations | None = None) -> Diagnosis:
    """Answer for the logs of one server (several ranks, or the parts of one run) and what the machine says of it.

    Args:
        sources: the logs read, in any order; several are taken for ranks or processes of one server.
        observed: exit code, kernel records and process states, where known.
    """
    observed = observed or Observations()
    transcript = build(list(sources), observed)
    life = read_lifecycle(transcript)
    roots, degraded = _candidates(transcript, life)
    roots += machine_candidates(transcript, life)
    roots.sort(key=lambda candidate: (candidate.tier, *candidate.order))
    degraded.sort(key=lambda candidate: candidate.order)
    return _answer(transcript, life, roots, degraded)


def _answer(transcript: Transcript, life: Lifecycle, roots: list[Candidate], degraded: list[Candidate]) -> Diagnosis:
    chosen = roots[0] if roots else None
    if chosen is None and life.stopped_while_starting:
        chosen = _stopped(transcript, life)
    if chosen is None and life.outcome is not StartOutcome.STOPPED and degraded:
        chosen = degraded[0]
    if chosen is None and life.outcome is StartOutcome.FAILED:
        chosen = _unexplained(transcript, life)
    if chosen is None:
        return Diagnosis(
            transcript.server, life.came_up, None, _nothing_read(transcript) or life.words, None, life.evidence
        )
    return Diagnosis(
        server=chosen.server if transcript.server == "unknown" and chosen.server else transcript.server,
        came_up=_came_up(life, chosen, roots),
        cause=chosen.cause.value,
        meaning=chosen.meaning,
        fix=chosen.fix,
        evidence=_without_repeats((*chosen.evidence, *life.evidence))[:8],
        others=_others(chosen, roots, degraded),
        ruled_out=_ruled_out(chosen, life),
    )


def _came_up(life: Lifecycle, chosen: Candidate, roots: list[Candidate]) -> bool | None:
    """A cause of a failed start in a log that shows no serving means that it did not come up."""
    if life.came_up is None and chosen in roots:
        return False
    if life.came_up is None and chosen.cause in (Cause.ENGINE_HUNG, Cause.HEALTH_STALL):
        return True
    if (
        life.came_up is None
        and chosen.cause in (Cause.STOPPED_ON_REQUEST, Cause.UNKNOWN)
        and life.outcome is not StartOutcome.OPEN
    ):
        return False
    return life.came_up


def _candidates(transcript: Transcript, life: Lifecycle) -> tuple[list[Candidate], list[Candidate]]:
    roots: dict[str, Candidate] = {}
    degraded: dict[str, Candidate] = {}
    rules = [rule for rule in RULES if _applies(rule, transcript.server)]
    anywhere = [rule for rule in rules if rule.where is Where.ANY]
    at_errors = [rule for rule in rules if rule.where is not Where.STACK]
    in_frames = [rule for rule in rules if rule.where is not Where.ERROR]
    for index, entry in enumerate(transcript.entries):
        for rule in at_errors if entry.error else in_frames if entry.frame else anywhere:
            into = degraded if rule.kind is Kind.DEGRADED else roots
            if rule.id in into:
                continue
            match = rule.pattern.search(entry.line.text)
            if match is None:
                continue
            found = Found(match, entry.line, entry.source, index, transcript)
            if rule.kind is Kind.ROOT and not life.counts(index):
                continue
            if _holds(rule, found):
                into[rule.id] = _candidate(rule, found)
    for source, log in enumerate(transcript.sources):
        for line in log.stats:
            for rule in anywhere:
                match = rule.pattern.search(line.text)
                if match and rule.id not in degraded and rule.kind is Kind.DEGRADED:
                    found = Found(match, line, source, max(len(transcript.entries) - 1, 0), transcript)
                    if rule.check is None or rule.check(found):
                        degraded[rule.id] = _candidate(
                            rule, found, own_line=Evidence(log.name, line.number, line.full.strip())
                        )
    return list(roots.values()), list(degraded.values())


def _applies(rule: Rule, server: str) -> bool:
    return not rule.servers or server == "unknown" or server in rule.servers


def _holds(rule: Rule, found: Found) -> bool:
    if not all(_there(need, found) is not None for need in rule.needs):
        return False
    if any(_there(need, found) is not None for need in rule.excludes):
        return False
    return rule.check is None or rule.check(found)


def _there(need: Need, found: Found) -> int | None:
    transcript = found.transcript
    if need.place == "block":
        return transcript.search(need.pattern, transcript.block_of(found.index))
    indices: Iterable[int] | None = None
    if need.place == "before":
        indices = range(found.index)
    elif need.place == "after":
        indices = range(found.index + 1, len(transcript.entries))
    return transcript.search(need.pattern, indices)


def _candidate(rule: Rule, found: Found, own_line: Evidence | None = None) -> Candidate:
    transcript = found.transcript
    evidence = [own_line or transcript.evidence(found.index)]
    for need in rule.needs:
        index = _there(need, found)
        if index is not None:
            evidence.append(transcript.evidence(index))
    time_s = found.line.time_s if found.line.time_s is not None else _NEVER
    cause = _cause(rule, found)
    general = rule.tier is not Priority.SPECIFIC and not (transcript.entries and transcript.entries[found.index].fatal)
    order = (float(general), time_s, float(_DEPTH.get(found.line.process, 2)), float(found.index))
    return Candidate(
        cause=cause,
        tier=_tier(rule, cause),
        order=order,
        meaning=_tidy(fill(rule.meaning, found)),
        fix=rule.fix(found),
        evidence=tuple(evidence),
        rules_out=rule.rules_out,
        server=rule.servers[0] if len(rule.servers) == 1 else "",
    )


def _cause(rule: Rule, found: Found) -> Cause:
    if rule.id != "embedded_code":
        return rule.cause
    code = found.text("code") or found.text("code2")
    return Cause(code) if code in {item.value for item in Cause} else Cause.UNKNOWN


def _tier(rule: Rule, cause: Cause) -> Priority:
    """What a server says of its own worker's end is fallout: the machine's records may say who ended it."""
    if rule.id == "embedded_code" and cause in (Cause.WORKER_KILLED, Cause.UNKNOWN):
        return Priority.FALLOUT
    return rule.tier


def _tidy(text: str) -> str:
    return text.replace(" (?)", "").replace(": ? ", ": ").replace(": ?.", ".").replace("??", "?")


def _others(chosen: Candidate, roots: list[Candidate], degraded: list[Candidate]) -> tuple[str, ...]:
    found = [
        candidate.cause.value
        for candidate in (*roots, *degraded)
        if candidate.tier is Priority.SPECIFIC and candidate.evidence[:1] != chosen.evidence[:1]
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
        "It was asked to stop (a signal) before it was ready; errors after that are its shutdown.",
        "nothing is broken: start it again, and give it the time that loading takes",
        evidence,
    )


def _nothing_read(transcript: Transcript) -> str | None:
    """What to say where no line could be read, so that "nothing wrong" is not said of what is no log; else None."""
    if transcript.entries or any(source.answered for source in transcript.sources):
        return None
    names = ", ".join(source.name for source in transcript.sources)
    return f"There is no line of text to read in {names}: it is empty, or not a log. That says nothing of the server."


def _unexplained(transcript: Transcript, life: Lifecycle) -> Candidate:
    evidence: list[Evidence] = list(life.evidence)
    for index in range(len(transcript.entries) - 1, -1, -1):
        entry = transcript.entries[index]
        if entry.error and EXCEPTION.match(entry.line.text):
            evidence.insert(0, transcript.evidence(index))
            break
    return Candidate(
        Cause.UNKNOWN,
        Priority.FALLOUT,
        (0.0,),
        "It failed, and no rule knows why.",
        "read the evidence; the first error of the first failing rank is the one that counts. Logs of the other ranks "
        "may name it",
        tuple(evidence),
    )
