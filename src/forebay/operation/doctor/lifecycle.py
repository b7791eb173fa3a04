"""Did the server come up, was it stopped, did it fail: and which lines can then be a cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from forebay.causes import Cause
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.records import Evidence
from forebay.operation.doctor.transcript import Transcript
from forebay.servers.log_patterns.common import EXCEPTION

__all__ = ["Lifecycle", "StartOutcome", "read_lifecycle"]

_ANNOUNCED = pattern(r"^Application startup complete\.")
_ENDED = pattern(
    r"^(?:Finished server process|Application shutdown complete|Shutting down)|\[shutdown\] API server: shutdown triggered"
)
_SERVING_STOP = pattern(r"^\[shutdown\] API server: shutdown triggered")  # the handler exists only while it serves
_ORDERLY = pattern(r"^\[shutdown\] (?:API server|Process manager: send sigterm|EngineCore: trigger received)")
_OWN_ERRORS_OF_A_STOP = pattern(
    r"EngineDeadError|output_handler failed|cannot schedule new futures after shutdown|CancelledError|KeyboardInterrupt"
)
_REQUEST_FAILED = pattern(r"^Exception in ASGI application")
_SELF_KILL = pattern(r"kill_process_tree called: .*include_parent=True")
_LATE_ERROR_LINES = 60


class StartOutcome(StrEnum):
    """What the log shows of the end."""

    FAILED = "failed"  # something was lost that the log itself calls fatal, or a start ended in an exception
    STOPPED = "stopped"  # it was asked to stop
    OPEN = "open"  # neither


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The answer, and which entries may be causes of it."""

    transcript: Transcript
    outcome: StartOutcome
    came_up: bool | None
    words: str
    evidence: tuple[Evidence, ...] = ()
    rules_out: tuple[tuple[Cause, str], ...] = field(default=())
    up_index: int | None = None

    @property
    def stopped_while_starting(self) -> bool:
        """The log shows a start under way, and a stop before its end."""
        starting = bool(self.transcript.advances) and self.up_index is None and self.came_up is not True
        return self.outcome is StartOutcome.STOPPED and starting and self.transcript.search(_SERVING_STOP) is None

    def counts(self, index: int) -> bool:
        """Whether an error at ``index`` can be why the server failed."""
        transcript = self.transcript
        if transcript.stop is not None and index >= transcript.stop and not self._lost_before_stop():
            return False
        if self.outcome is StartOutcome.STOPPED:
            return False
        if self.outcome is StartOutcome.OPEN and self.came_up:
            return False
        return not transcript.survived(index)

    def may_fail(self, index: int) -> bool:
        """Whether an error at ``index`` may be why a start did not end well: nothing went on after it."""
        transcript = self.transcript
        stopped = transcript.stop is not None and index >= transcript.stop and not self._lost_before_stop()
        return not stopped and not transcript.survived(index) and not self.follows_a_stop(index)

    def follows_a_stop(self, index: int) -> bool:
        """The line is what an orderly shutdown prints of itself."""
        transcript = self.transcript
        if self.outcome is StartOutcome.FAILED or transcript.search(_ORDERLY) is None:
            return False
        report = transcript.block_of(index) if transcript.entries[index].block >= 0 else (index,)
        return transcript.search(_OWN_ERRORS_OF_A_STOP, report) is not None

    def _lost_before_stop(self) -> bool:
        fatal, stop = self.transcript.fatal, self.transcript.stop
        return fatal is not None and stop is not None and fatal < stop


def read_lifecycle(transcript: Transcript) -> Lifecycle:
    """Read it from the transcript; what the machine says of the exit is added."""
    up = _up(transcript)
    outcome = _outcome(transcript, up)
    evidence: list[Evidence] = []
    if transcript.stop is not None and outcome is StartOutcome.STOPPED:
        evidence.append(transcript.evidence(transcript.stop))
    elif transcript.fatal is not None and outcome is StartOutcome.FAILED:
        evidence.append(transcript.evidence(transcript.fatal))
    elif up is True:
        evidence.extend(_up_evidence(transcript))
    return Lifecycle(
        transcript,
        outcome,
        False if up is not True and outcome is StartOutcome.FAILED else up,
        _words(outcome, up),
        tuple(evidence),
        _ruled_out(transcript),
        transcript.up,
    )


def _up(transcript: Transcript) -> bool | None:
    if transcript.port_lost:
        return False
    if transcript.answered or transcript.search(_REQUEST_FAILED) is not None:
        return True
    if transcript.up is None:
        return True if any(source.stats for source in transcript.sources) else None
    line = transcript.entries[transcript.up].line
    if not _ANNOUNCED.search(line.text):
        return True
    quiet = not any(source.answered for source in transcript.sources)
    ended = transcript.search(_ENDED, range(transcript.up + 1, len(transcript.entries))) is not None
    # It announced itself, answered nobody, and ended: a vLLM whose port another holds writes the very same log.
    return None if quiet and ended else True


def _outcome(transcript: Transcript, up: bool | None) -> StartOutcome:
    fatal, stop = transcript.fatal, transcript.stop
    if stop is not None and (fatal is None or stop < fatal) and not _error_before(transcript, stop, up):
        return StartOutcome.STOPPED
    if transcript.observed.stop_requested and fatal is None:
        return StartOutcome.STOPPED
    if fatal is not None and (up is not True or not transcript.survived(fatal)):
        return StartOutcome.FAILED
    if up is not True and _open_error(transcript) is not None:
        return StartOutcome.FAILED
    return StartOutcome.OPEN


def _error_before(transcript: Transcript, stop: int, up: bool | None) -> bool:
    """An unhandled exception of a start, before the stop: the stop came after the failure."""
    if up is True:
        return False
    return any(
        entry.error and EXCEPTION.match(entry.line.text) and not transcript.survived(index)
        for index, entry in enumerate(transcript.entries[:stop])
        if not entry.line.text.startswith(("KeyboardInterrupt", "asyncio.exceptions.CancelledError"))
    )


def _open_error(transcript: Transcript) -> int | None:
    """An exception that no progress followed, in a log that calls nothing fatal."""
    orderly = transcript.search(_ORDERLY) is not None
    for index, entry in enumerate(transcript.entries):
        if not entry.error or not EXCEPTION.match(entry.line.text) or transcript.survived(index):
            continue
        if not (orderly and _OWN_ERRORS_OF_A_STOP.search(entry.line.text)):
            return index
    return None


def _up_evidence(transcript: Transcript) -> list[Evidence]:
    if transcript.up is not None:
        return [transcript.evidence(transcript.up)]
    for source in transcript.sources:
        line = source.first_served or source.first_answer
        if line is not None:
            return [Evidence(source.name, line.number, line.full.strip())]
    return []


def _words(outcome: StartOutcome, up: bool | None) -> str:
    if outcome is StartOutcome.STOPPED:
        return "It served, and was stopped on request: nothing is wrong."
    if up is True:
        return "It came up, and the log shows nothing wrong."
    if up is None:
        return "The log shows nothing wrong; it does not show whether the server came up."
    return "It did not come up."


def _ruled_out(transcript: Transcript) -> tuple[tuple[Cause, str], ...]:
    code = transcript.observed.exit_code
    kills_itself = transcript.search(_SELF_KILL) is not None
    if code in (137, -9) and (kills_itself or transcript.server == "sglang") and not transcript.observed.oom_kills:
        return (
            (
                Cause.HOST_OOM_KILLED,
                "exit 137 of SGLang is its own SIGKILL of its process tree; no kernel or cgroup record says out of "
                "memory",
            ),
        )
    if kills_itself:
        return ((Cause.HOST_OOM_KILLED, "an exit code 137 after this is the server's own SIGKILL of its process tree"),)
    return ()
