"""``--on``: the same command on another machine, over SSH or in a container."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import click

from forebay.errors import ForebayError, UsageError
from forebay.operation.output import Output

if TYPE_CHECKING:
    from forebay.commands.requests import Request
    from forebay.remote.agent_client import Resume
    from forebay.remote.destination import Destination

__all__ = [
    "SECONDS",
    "QuietOutput",
    "api_key_option",
    "destinations",
    "each_host",
    "on_option",
    "one_host",
    "run",
]

SECONDS = click.FloatRange(0, 1e9)
"""A time to wait; not infinite and not NaN, which no clock can wait for."""

_Command = TypeVar("_Command", bound=Callable[..., Any])
_T = TypeVar("_T")
_MAX_AT_ONCE = 32


def on_option(command: _Command) -> _Command:
    """The option ``--on``."""
    return click.option(
        "--on",
        multiple=True,
        envvar="FOREBAY_ON",
        metavar="HOST",
        help="Do it there, over SSH: an alias, user@host:port, HOST,lxc:NAME, docker:NAME, a group of hosts.toml. "
        "[env: FOREBAY_ON]",
    )(command)


def api_key_option(command: _Command) -> _Command:
    """The option ``--api-key``, better given by its variable: a command line can be read by every user."""
    return click.option("--api-key", envvar="FOREBAY_API_KEY", help="Key of the server's API.  [env: FOREBAY_API_KEY]")(
        command
    )


def destinations(on: Sequence[str]) -> list[Destination]:
    """The machines that ``--on`` names; empty for this machine.

    Raises:
        UsageError: a name or hosts.toml cannot be read.
    """
    if not on:
        return []
    from forebay.remote.destination import parse_destinations
    from forebay.remote.hosts_file import load_hosts

    return parse_destinations(on, load_hosts())


def one_host(on: Sequence[str], command: str) -> Destination | None:
    """The machine that ``--on`` names; None for this machine.

    Raises:
        UsageError: it names several, and the command works on one.
    """
    found = destinations(on)
    if len(found) > 1:
        names = ", ".join(destination.name for destination in found)
        raise UsageError(f"`forebay {command}` works on one host, --on names {names}", fix=f"--on {found[0].name}")
    return found[0] if found else None


def run(
    request: Request, output: Output, host: Destination | None = None, *, resume: Resume | None = None
) -> dict[str, Any]:
    """Run a request on this machine, or on ``host``.

    Args:
        resume: see ``AgentClient.call``.
    """
    if host is None:
        from forebay.commands.handlers import run_request
        from forebay.machine.local import LocalMachine

        return run_request(LocalMachine(), request, output)
    from forebay.commands.requests import encode_request
    from forebay.remote.agent_client import AgentClient
    from forebay.remote.transport import Transport

    return AgentClient(Transport(host), output).call(encode_request(request), resume=resume)


def each_host(hosts: Sequence[Destination], work: Callable[[Destination], _T]) -> list[tuple[str, _T | ForebayError]]:
    """``work`` on all hosts side by side: (name, result or error) in the order of ``hosts``."""

    def guarded(host: Destination) -> _T | ForebayError:
        try:
            return work(host)
        except ForebayError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(_MAX_AT_ONCE, len(hosts))) as pool:
        return [(host.name, result) for host, result in zip(hosts, pool.map(guarded, hosts), strict=True)]


class QuietOutput:
    """An ``Output`` for commands whose result is all there is to show; lines go to stderr."""

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None:
        pass

    def say(self, text: str) -> None:
        click.echo(text, err=True)
