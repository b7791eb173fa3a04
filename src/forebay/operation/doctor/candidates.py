"""From events and facts to possible causes: each rule whose event, activity and conditions hold makes one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forebay.causes import Cause
from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.evidence_base import EventMatch, EvidenceBase
from forebay.operation.doctor.fixes import fill
from forebay.operation.doctor.patterns import event_patterns
from forebay.operation.doctor.records import Confidence, Evidence
from forebay.operation.doctor.rule import Kind, Priority, Rule
from forebay.operation.doctor.rules import RULES

__all__ = ["find_candidates"]

_DEPTH = {"worker": 0, "engine": 1, "": 2, "front": 3}
_BEFORE_ALL = -1.0


def find_candidates(base: EvidenceBase) -> tuple[list[Candidate], list[Candidate]]:
    """The causes of a failed server, and those of one that runs wrongly; each list sorted, the most telling first."""
    rules = [rule for rule in RULES if _applies(rule, base.server)]
    roots = [found for rule in rules if rule.kind is Kind.ROOT for found in _first(rule, base, counted=True)]
    degraded = [found for rule in rules if rule.kind is Kind.DEGRADED for found in _first(rule, base, counted=False)]
    degraded += _from_statistics(rules, base, {found.cause for found in degraded})
    roots.sort(key=lambda candidate: (candidate.priority, *candidate.order))
    degraded.sort(key=lambda candidate: candidate.order)
    return roots, degraded


def _applies(rule: Rule, server: str) -> bool:
    return not rule.servers or server == "unknown" or server in rule.servers


def _first(rule: Rule, base: EvidenceBase, *, counted: bool) -> Iterable[Candidate]:
    """The first match of the rule's event for which all its conditions hold."""
    for match in base.events.get(rule.event, ()):
        if counted and not base.life.counts(match.index):
            continue
        if _holds(rule, match):
            return [_candidate(rule, match)]
    return []


def _holds(rule: Rule, match: EventMatch) -> bool:
    base = match.base
    if rule.activities and match.activity not in rule.activities:
        return False
    if not all(base.find(need.event, need.place, match) is not None for need in rule.needs):
        return False
    if any(base.find(bar.event, bar.place, match) is not None for bar in rule.excludes):
        return False
    return rule.check is None or rule.check(match)


def _from_statistics(rules: Sequence[Rule], base: EvidenceBase, known: set[Cause]) -> list[Candidate]:
    """Rules on the last lines of throughput statistics, which are not among the kept lines."""
    transcript = base.transcript
    found: list[Candidate] = []
    for source, log in enumerate(transcript.sources):
        for line in log.stats:
            for rule in rules:
                hit = event_patterns()[rule.event].find(line.text) if rule.kind is Kind.DEGRADED else None
                if hit is None or rule.cause in known:
                    continue
                match = EventMatch(hit, line, source, max(len(transcript.entries) - 1, 0), base)
                if rule.check is None or rule.check(match):
                    known.add(rule.cause)
                    found.append(_candidate(rule, match, Evidence(log.name, line.number, line.full.strip())))
    return found


def _candidate(rule: Rule, match: EventMatch, own_line: Evidence | None = None) -> Candidate:
    base = match.base
    transcript = base.transcript
    evidence = [own_line or transcript.evidence(match.index)]
    for need in rule.needs:
        index = base.find(need.event, need.place, match)
        if index is not None:
            evidence.append(transcript.evidence(index))
    time_s = match.line.time_s if match.line.time_s is not None else _BEFORE_ALL
    cause = _cause(rule, match)
    fatal = bool(transcript.entries) and transcript.entries[match.index].fatal
    general = rule.priority is not Priority.SPECIFIC and not fatal
    return Candidate(
        cause=cause,
        priority=_priority(rule, cause),
        order=(float(general), time_s, float(_DEPTH.get(match.line.process, 2)), float(match.index)),
        meaning=fill(rule.meaning, match),
        fix=rule.fix(match),
        evidence=tuple(evidence),
        rules_out=rule.rules_out,
        server=rule.servers[0] if len(rule.servers) == 1 else "",
        index=match.index if own_line is None else None,
        confidence=rule.confidence or (Confidence.CERTAIN if rule.priority is Priority.SPECIFIC else Confidence.LIKELY),
    )


def _cause(rule: Rule, match: EventMatch) -> Cause:
    if rule.id != "embedded_code":
        return rule.cause
    code = match.text("code")
    return Cause(code) if code in {item.value for item in Cause} else Cause.UNKNOWN


def _priority(rule: Rule, cause: Cause) -> Priority:
    """What a server says of its own worker's end is secondary: the machine's records may say who ended it."""
    if rule.id == "embedded_code" and cause in (Cause.WORKER_KILLED, Cause.UNKNOWN):
        return Priority.SECONDARY
    return rule.priority
