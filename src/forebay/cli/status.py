"""``forebay status``: the runs on this machine and their state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from forebay.cli._complete import run_names
from forebay.sizes import format_binary

if TYPE_CHECKING:
    from forebay.operation.status import RunStatus

__all__ = ["command"]


@click.command("status", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", required=False, shell_complete=run_names)
@click.option("--all", "everything", is_flag=True, help="Ended runs too.")
@click.option("--json", "as_json", is_flag=True, help="A list of runs as JSON.")
def command(name: str | None, everything: bool, as_json: bool) -> int:
    """The runs on this machine: stage or state, age, memory, tokens per second.

    A run that ended is shown with --all, or while something of it is left. Of each name the last 10 ended runs are kept
    (NAME.1, NAME.2, ...), 100 over all names; `up` removes older ones.
    """
    from forebay.machine.local import LocalMachine
    from forebay.operation.status import overview

    rows = overview(LocalMachine(), name=name, earlier=everything)
    if not everything and name is None:
        rows = [row for row in rows if row.state not in ("dead", "stopped") or row.processes]
    if as_json:
        click.echo(json.dumps([row.as_json() for row in rows]))
        return 0
    if not rows:
        click.echo("no run is up (`forebay status --all` shows those that ended)")
    for row in rows:
        _show(row)
    return 0


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _show(row: RunStatus) -> None:
    stage = f" ({row.stage})" if row.state in ("starting", "warming", "stalled") and row.stage else ""
    speed = "" if row.tokens_per_s is None else f", {row.tokens_per_s:.1f} tokens/s"
    cause = f", cause: {row.cause}" if row.cause and row.state == "dead" else ""
    click.echo(f"{row.name}: {row.state}{stage}{cause} for {_age(row.state_s)}, up {_age(row.age_s)}{speed}")
    click.echo(f"    {row.server} {row.model} at {row.url}, {row.processes} processes, {format_binary(row.rss_bytes)}")
    if row.note:
        click.echo(f"    {row.note}")
