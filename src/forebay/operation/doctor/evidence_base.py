"""All that the rules look at: the transcript, the events found in it, the facts of the launch and the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from forebay.operation.doctor.activities import (
    ProcessActivity,
    activity_of_frames,
    activity_of_message,
    activity_of_stage,
)
from forebay.operation.doctor.facts import HostFacts, LaunchFacts
from forebay.operation.doctor.lifecycle import Lifecycle
from forebay.operation.doctor.patterns import Where, event_patterns
from forebay.operation.doctor.records import Observations
from forebay.operation.doctor.transcript import Transcript
from forebay.servers.log_patterns import LogLine

__all__ = ["EventMatch", "EvidenceBase", "gather"]

_FRAME_LINES = 60


@dataclass(slots=True)
class EvidenceBase:
    """What one diagnosis rests on.

    Attributes:
        transcript: the lines of all sources, in order.
        life: whether the server came up, was stopped, or failed.
        launch: versions, flags, ranks; machine: memory and GPUs, where known.
        events: event name -> its matches, in the order of the log.
    """

    transcript: Transcript
    life: Lifecycle
    launch: LaunchFacts
    machine: HostFacts
    events: dict[str, list[EventMatch]] = field(default_factory=dict)

    @property
    def server(self) -> str:
        """``embedded``, ``sglang``, ``vllm`` or ``unknown``."""
        return self.transcript.server

    @property
    def observed(self) -> Observations:
        """What the machine recorded of the run."""
        return self.transcript.observed

    def find(self, event: str, place: str, match: EventMatch) -> int | None:
        """Index of the first line with ``event`` at ``place`` (see ``rule.Requirement``) of ``match``, or None."""
        found = [other.index for other in self.events.get(event, ())]
        if place == "block":
            block = set(self.transcript.block_of(match.index))
            found = [index for index in found if index in block]
        elif place == "before":
            found = [index for index in found if index < match.index]
        elif place == "after":
            found = [index for index in found if index > match.index]
        return found[0] if found else None

    def first(self, event: str) -> EventMatch | None:
        """The first match of ``event``."""
        found = self.events.get(event)
        return found[0] if found else None

    def activity_at(self, index: int) -> ProcessActivity:
        """What the process that wrote the line at ``index`` was doing."""
        entry = self.transcript.entries[index]
        for activity in (activity_of_message(entry.line.text), activity_of_frames(reversed(self.frames_of(index)))):
            if activity is not ProcessActivity.UNKNOWN:
                return activity
        return activity_of_stage(entry.stage)

    def frames_of(self, index: int) -> list[str]:
        """The frames of the traceback that ends at the line, outermost first: file lines and their code."""
        entries = self.transcript.entries
        entry = entries[index]
        frames: list[str] = []
        for at in range(index - 1, max(-1, index - 400), -1):
            other = entries[at]
            if other.source != entry.source or (not frames and at < index - _FRAME_LINES):
                break
            if (other.line.name, other.line.origin) != (entry.line.name, entry.line.origin):
                continue
            if other.frame:
                frames.append(other.line.text)
            elif frames:
                break
        frames.reverse()
        return frames


@dataclass(frozen=True, slots=True)
class EventMatch:
    """An event found in the log, with all that a condition or a fix may want.

    Attributes:
        match: of the event's wording; its named groups are the event's fields.
        line: the line it stands in; index: of the line in ``base.transcript.entries``; source: index of its file.
    """

    match: re.Match[str]
    line: LogLine
    source: int
    index: int
    base: EvidenceBase

    @property
    def activity(self) -> ProcessActivity:
        """What the process was doing."""
        return self.base.activity_at(self.index)

    def text(self, group: str, fallback: str = "") -> str:
        """A named group's text, or ``fallback``."""
        return self.match.groupdict().get(group) or fallback

    def number(self, group: str) -> float | None:
        """A named group as a number (thousands commas allowed), or None."""
        found = self.match.groupdict().get(group)
        try:
            return float(found.replace(",", "")) if found else None
        except ValueError:
            return None


def gather(transcript: Transcript, life: Lifecycle, launch: LaunchFacts, machine: HostFacts) -> EvidenceBase:
    """Find all events of the tables in the transcript."""
    base = EvidenceBase(transcript, life, launch, machine)
    rows = event_patterns().values()
    tables = {where: [row for row in rows if row.where is where] for where in Where}
    for index, entry in enumerate(transcript.entries):
        text = entry.line.text
        lowered = text.lower()
        wanted = list(tables[Where.ANY])
        if entry.error:
            wanted += tables[Where.ERROR]
        elif entry.frame:
            wanted += tables[Where.STACK]
        for row in tables[Where.ORIGIN] if entry.line.origin else ():
            found = row.find(entry.line.origin)
            if found:
                base.events.setdefault(row.name, []).append(EventMatch(found, entry.line, entry.source, index, base))
        for row in wanted:
            found = row.find(text, lowered)
            if found:
                base.events.setdefault(row.name, []).append(EventMatch(found, entry.line, entry.source, index, base))
    return base
