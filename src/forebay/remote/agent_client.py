"""Requests to the operator at a destination that survive the loss of the connection.

A request is sent again over a new connection and goes on where it was: ``up`` by its run id and the offset of the
events seen, ``logs`` by offset and inode, everything else from its beginning (it changes nothing, or can be repeated).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.errors import ExitCode, ForebayError, HostUnreachableError
from forebay.remote.agent_session import AgentSession, ConnectionLostError
from forebay.remote.transport import Transport

__all__ = ["AgentClient", "HostOutput", "Resume"]

_CLOCK_S = 120.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 3.0)
_MAX_SILENT = 3


class HostOutput(Protocol):
    """Takes what the host sends; the same as ``operation.output.Output``."""

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None: ...

    def say(self, text: str) -> None: ...


Resume = Callable[[dict[str, Any], Mapping[str, Any], int | None], None]
"""Changes the request's fields after an event (and its offset), so that a repeated request goes on behind it."""


@dataclass(frozen=True, slots=True)
class _Lost:
    since: float
    why: str


class AgentClient:
    """Sends requests to one destination.

    Args:
        patience_s: how long to try to connect again before giving up; None: for ever.
    """

    def __init__(self, transport: Transport, output: HostOutput, *, patience_s: float | None = None) -> None:
        self._transport = transport
        self._output = output
        self._patience_s = patience_s
        self._clock_told = False

    def call(
        self,
        fields: Mapping[str, Any],
        *,
        resume: Resume | None = None,
        on_interrupt: Callable[[AgentSession], None] | None = None,
    ) -> dict[str, Any]:
        """Run a request to its result.

        Args:
            resume: see ``Resume``.
            on_interrupt: what Ctrl-C does while connected; without it Ctrl-C ends the command here.

        Raises:
            HostUnreachableError: the destination cannot be reached, or lacks something.
            ForebayError: the request failed there.
        """
        request, lost, silent = dict(fields), None, 0
        while True:
            session = AgentSession(self._transport)
            try:
                self._connect(session, lost)
                lost = None
                return self._exchange(session, request, resume, on_interrupt)
            except ConnectionLostError as error:
                silent = 0 if session.heard else silent + 1
                if silent >= _MAX_SILENT:
                    raise HostUnreachableError(
                        f"{self._transport.name}: the helper ends there without an answer: {error}",
                        fix="the Python there may be broken; name another one in hosts.toml: python",
                    ) from error
                lost = _Lost(time.monotonic(), str(error))
                self._output.say(f"{self._transport.name}: the connection was lost ({error}); connecting again")
                if resume is not None:
                    resume(request, {"event": "connection_lost"}, None)
            finally:
                session.close()

    def _connect(self, session: AgentSession, lost: _Lost | None) -> None:
        """Start the helper; after a loss again and again until it can be, or patience is over."""
        attempt, told = 0, ""
        while True:
            try:
                session.start()
                break
            except (HostUnreachableError, ConnectionLostError) as error:
                session.close()
                if lost is None and isinstance(error, HostUnreachableError):
                    raise
                since = lost.since if lost is not None else time.monotonic() - attempt
                if self._patience_s is not None and time.monotonic() - since > self._patience_s:
                    raise self._given_up(since, error) from error
                if lost is None and attempt >= len(_PAUSES_S):
                    raise HostUnreachableError(
                        f"{self._transport.name}: the connection ends again and again: {error}", fix="see `ssh -v`"
                    ) from error
                if str(error) != told and attempt >= len(_PAUSES_S):
                    told = str(error)
                    self._output.say(f"still no connection: {error}")
            if self._transport.ssh is not None:
                self._transport.ssh.close()  # a connection that answers nothing any more
            time.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
            attempt += 1
        if lost is not None:
            self._output.say(f"{self._transport.name}: connected again after {time.monotonic() - lost.since:.0f} s")
        self._tell_clock(session)

    def _exchange(
        self,
        session: AgentSession,
        request: dict[str, Any],
        resume: Resume | None,
        on_interrupt: Callable[[AgentSession], None] | None,
    ) -> dict[str, Any]:
        session.request(request)
        messages = session.messages()
        while True:
            try:
                message = next(messages)
            except StopIteration:
                raise ConnectionLostError("it ended without a result") from None
            except KeyboardInterrupt:
                if on_interrupt is None:
                    raise
                on_interrupt(session)
                messages = session.messages()
                continue
            if "result" in message:
                result: dict[str, Any] = message["result"]
                return result
            if "error" in message:
                raise _host_error(self._transport.name, message["error"])
            if "say" in message:
                self._output.say(str(message["say"]))
            elif "event" in message:
                self._output.event(message["event"], offset=message.get("offset"))
                if resume is not None:
                    resume(request, message["event"], message.get("offset"))

    def _tell_clock(self, session: AgentSession) -> None:
        ahead = session.clock_ahead_s
        if abs(ahead) > _CLOCK_S and not self._clock_told:
            self._clock_told = True
            way = "ahead of" if ahead > 0 else "behind"
            self._output.say(
                f"note: the clock of {self._transport.name} is {abs(ahead) / 60:.0f} min {way} this one; "
                "times of its runs are by its own clock (fix: timedatectl set-ntp true, there)"
            )

    def _given_up(self, since: float, error: Exception) -> HostUnreachableError:
        return HostUnreachableError(
            f"{self._transport.name}: no connection for {time.monotonic() - since:.0f} s: {error}",
            fix=f"whatever runs there goes on; when it can be reached: `forebay status --on {self._transport.name}`",
        )


def _host_error(name: str, fields: Mapping[str, Any]) -> ForebayError:
    error = ForebayError(f"{name}: {fields['message']}", fix=fields.get("fix"), code=fields.get("code"))
    error.exit_code = ExitCode(int(fields.get("exit_code", 1)))
    return error
