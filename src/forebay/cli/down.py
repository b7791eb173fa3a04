"""``forebay down``: end a run and check that nothing is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from forebay.cli._complete import run_names
from forebay.cli._hosts import on_option, one_host, run

__all__ = ["command"]


@click.command("down", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", shell_complete=run_names)
@click.option("--drain-seconds", type=click.FloatRange(0), help="Time for running requests to finish.  [default: 30]")
@on_option
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(name: str, drain_seconds: float | None, on: tuple[str, ...], as_json: bool) -> int:
    """End the run NAME, and check that nothing of it is left.

    SIGTERM, time to drain, SIGKILL; engines without an API server too. Only processes that belong to the run are
    signalled. Then the checks: processes, port, device memory, /dev/shm, host memory. It works after the API server was
    killed, without the supervisor, and after a reboot.

    Exit 0: nothing is left. Exit 8: something is; the output says what, and who holds it.
    """
    from forebay.commands.requests import DownRequest

    request = DownRequest(name=name, drain_seconds=drain_seconds)
    result = run(request, _Steps(quiet=as_json), one_host(on, "down"))
    if as_json:
        shown = {key: result[key] for key in ("name", "clean", "steps", "checks")}
        click.echo(json.dumps({"schema": 2, **shown}))
    return int(result["exit_code"])


class _Steps:
    """Shows each step as it is taken."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None:
        pass

    def say(self, text: str) -> None:
        if not self._quiet:
            click.echo(text)
