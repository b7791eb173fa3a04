"""``forebay status``: the runs on a machine and their state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from forebay.cli._complete import run_names
from forebay.cli._hosts import QuietOutput, destinations, each_host, on_option, run
from forebay.errors import ExitCode, ForebayError
from forebay.sizes import format_binary

__all__ = ["command"]


@click.command("status", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", required=False, shell_complete=run_names)
@click.option("--all", "everything", is_flag=True, help="Ended runs too.")
@on_option
@click.option("--json", "as_json", is_flag=True, help="A list of runs as JSON.")
def command(name: str | None, everything: bool, on: tuple[str, ...], as_json: bool) -> int:
    """The runs on this machine, or on others: stage or state, age, memory, tokens per second.

    \b
    forebay status
    forebay status --on gpu1,gpu2          both hosts at once
    forebay status my-run --on root@pve,lxc:101

    A run that ended is shown with --all, or while something of it is left. Of each name the last 10 ended runs are kept
    (NAME.1, NAME.2, ...), 100 over all names; `up` removes older ones.

    Exit 3 where a host cannot be reached.
    """
    from forebay.commands.requests import StatusRequest

    request, hosts = StatusRequest(name, everything), destinations(on)
    if not hosts:
        rows = _shown(run(request, QuietOutput())["rows"], name, everything)
        _print(rows, as_json)
        return 0
    code, shown = 0, []
    for host, result in each_host(hosts, lambda host: run(request, QuietOutput(), host)["rows"]):
        if isinstance(result, ForebayError):
            click.echo(f"forebay: {result.message}" + (f"\n  fix: {result.fix}" if result.fix else ""), err=True)
            code = max(code, int(result.exit_code))
        else:
            shown += [{"on": host, **row} for row in _shown(result, name, everything)]
    if shown or not code:
        _print(shown, as_json)
    return int(ExitCode(code))


def _shown(rows: Sequence[Mapping[str, Any]], name: str | None, everything: bool) -> list[Mapping[str, Any]]:
    if everything or name is not None:
        return list(rows)
    return [row for row in rows if row["state"] not in ("dead", "stopped") or row["processes"]]


def _print(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no run is up (`forebay status --all` shows those that ended)")
    for row in rows:
        _show(row)


def _show(row: Mapping[str, Any]) -> None:
    state, stage = row["state"], row["stage"]
    where = f"{row['on']}  " if "on" in row else ""
    shown_stage = f" ({stage})" if state in ("starting", "warming", "stalled") and stage else ""
    speed = "" if row["tokens_per_s"] is None else f", {row['tokens_per_s']:.1f} tokens/s"
    cause = f", cause: {row['cause']}" if row["cause"] and state == "dead" else ""
    ages = f"for {_age(row['state_s'])}, up {_age(row['age_s'])}"
    click.echo(f"{where}{row['name']}: {state}{shown_stage}{cause} {ages}{speed}")
    memory = format_binary(row["rss_bytes"])
    click.echo(f"    {row['server']} {row['model']} at {row['url']}, {row['processes']} processes, {memory}")
    if row["note"]:
        click.echo(f"    {row['note']}")


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
