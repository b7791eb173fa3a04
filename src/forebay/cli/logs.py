"""``forebay logs``: a run's log, shown or followed."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import Any

import click

from forebay.cli._complete import run_names
from forebay.cli._hosts import on_option, one_host, run

__all__ = ["command"]


@click.command("logs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", shell_complete=run_names)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended (Ctrl-C stops showing, not the run).")
@click.option(
    "-n", "--lines", default=200, show_default=True, type=click.IntRange(0, 10_000_000), help="Last lines shown first."
)
@click.option("--events", is_flag=True, help="Forebay's own events (JSON lines) instead of the server's log.")
@click.option("--path", "path_only", is_flag=True, help="Print the file's path only.")
@on_option
def command(name: str, follow: bool, lines: int, events: bool, path_only: bool, on: tuple[str, ...]) -> int:
    """Show the log of the run NAME.

    Over SSH a log that is followed goes on behind the last byte shown after the connection was lost: nothing is missing
    and nothing comes twice.
    """
    from forebay.commands.requests import LogsRequest

    request = LogsRequest(name, follow, lines, events, path_only)
    result = run(request, _Bytes(), one_host(on, "logs"), resume=_behind)
    if path_only:
        click.echo(result["path"])
    return 0


def _behind(request: dict[str, Any], event: Mapping[str, Any], offset: int | None) -> None:
    """After a lost connection the log goes on behind the last piece that was shown."""
    if event["event"] == "log_piece" and offset is not None:
        request["offset"], request["inode"] = offset, event["inode"]


class _Bytes:
    """Writes the pieces of a log to stdout as they are."""

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None:
        if event["event"] == "log_piece":
            sys.stdout.buffer.write(base64.b64decode(event["data"]))
            sys.stdout.flush()

    def say(self, text: str) -> None:
        click.echo(text, err=True)
