"""``forebay up --on HOST``: the server runs there under its supervisor, this command shows and forwards it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay.cli._live import Screen
from forebay.commands.requests import DownRequest, UpRequest, encode_request
from forebay.errors import ExitCode, ForebayError, UsageError
from forebay.operation.start.up_options import UpOptions
from forebay.remote.agent_client import AgentClient
from forebay.remote.agent_session import AgentSession
from forebay.remote.port_forward import PortForward, open_forward
from forebay.remote.transport import Transport

if TYPE_CHECKING:
    from forebay.remote.destination import Destination

__all__ = ["up_on_host", "up_on_hosts"]

_END_PATIENCE_S = 30.0


def up_on_host(options: UpOptions, host: Destination, screen: Screen) -> int:
    """Run ``up`` on ``host``; the exit code.

    Ctrl-C ends the server there, over a new connection where the one in use is lost.
    """
    transport = Transport(host)
    output = _HostScreen(screen, transport)
    client = AgentClient(transport, output)
    request = encode_request(UpRequest(with_plan_text(options)))
    try:
        return int(client.call(request, resume=_go_on, on_interrupt=_interrupt)["exit_code"])
    except KeyboardInterrupt:
        return _end(options, transport, screen)
    finally:
        output.close()


def up_on_hosts(options: UpOptions, hosts: Sequence[Destination], screen: Screen) -> int:
    """A server over several hosts."""
    names = ", ".join(host.name for host in hosts)
    raise UsageError(f"`forebay up` starts a server on one host, --on names {names}", fix=f"--on {hosts[0].name}")


def with_plan_text(options: UpOptions) -> UpOptions:
    """A saved plan is a file of this machine: its content travels."""
    if not options.model.endswith(".json") or not Path(options.model).is_file():
        return options
    try:
        return replace(options, plan_text=Path(options.model).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{options.model} cannot be read: {error}") from error


def _go_on(request: dict[str, Any], event: Mapping[str, Any], offset: int | None) -> None:
    """After a lost connection: the run of this id, behind the last event seen."""
    request["options"]["resume"] = True
    if offset is not None:
        request["options"]["events_offset"] = offset


def _interrupt(session: AgentSession) -> None:
    session.interrupt()


def _end(options: UpOptions, transport: Transport, screen: Screen) -> int:
    """Ctrl-C while nothing is connected: end the run all the same, or say that it may go on."""
    name = transport.name
    screen.say(f"ending the run on {name} (Ctrl-C again: leave it)")
    client = AgentClient(transport, screen, patience_s=_END_PATIENCE_S)
    try:
        result = client.call(encode_request(DownRequest(run_id=options.run_id)))
        return int(ExitCode.INTERRUPTED if result["clean"] else ExitCode.LEFT_BEHIND)
    except (ForebayError, KeyboardInterrupt) as error:
        why = error.message if isinstance(error, ForebayError) else "interrupted"
        click.echo(
            f"forebay: the run on {name} could not be ended and may go on there: {why}\n"
            f"  fix: when {name} can be reached: `forebay status --on {name}`, then `forebay down NAME --on {name}`",
            err=True,
        )
        return int(ExitCode.LEFT_BEHIND)


class _HostScreen:
    """Shows the events of a run on another machine; its port is forwarded once it serves."""

    def __init__(self, screen: Screen, transport: Transport) -> None:
        self._screen = screen
        self._transport = transport
        self._forward: PortForward | None = None

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None:
        if event["event"] == "serving":
            event = self._serving(event)
        self._screen.event(event)

    def say(self, text: str) -> None:
        self._screen.say(text)

    def close(self) -> None:
        """Take the forwarded port back."""
        if self._forward is not None:
            self._forward.close()

    def _serving(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        shown = {**event, "on": self._transport.name}
        if not event["detached"] and self._forward is None:
            try:
                self._forward = open_forward(
                    self._transport, str(event["host"]), int(event["port"]), tell=self._screen.say
                )
            except ForebayError as error:
                self._screen.say(f"note: {error.message}")
        if self._forward is not None:
            shown["local_url"] = self._forward.url
        return shown
