"""``forebay verify``: is the cache in effect: asked, effective, observed."""

from __future__ import annotations

import json

import click

from forebay.cli._complete import run_names
from forebay.cli._hosts import SECONDS, QuietOutput, api_key_option, on_option, one_host, run
from forebay.cli._verify_view import show_rows

__all__ = ["command"]


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="NAME|URL", shell_complete=run_names)
@click.option(
    "--log", type=click.Path(exists=False), help="The server's log; settings and pool sizes in it count as effective."
)
@click.option("--server", type=click.Choice(["embedded", "sglang", "vllm"]), help="[default: detected]")
@click.option("--probe-seconds", type=SECONDS, default=60.0, show_default=True, help="The longest probe; 0 sends none.")
@click.option("--force", is_flag=True, help="Probe while requests of others run; it evicts their pages.")
@api_key_option
@on_option
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(
    target: str,
    log: str | None,
    server: str | None,
    probe_seconds: float,
    force: bool,
    api_key: str | None,
    on: tuple[str, ...],
    as_json: bool,
) -> int:
    """Compare what was asked for at NAME|URL with what is in effect, and probe whether the cache is really read.

    \b
    asked       the command line
    effective   the server's own report, its metrics, its log
    observed    a probe: send a prompt, evict it from the device, send it again; compare the tier's counters, the time
                to the first token and the output

    The probe first says what it costs, and does not run while requests of others do (--force).

    Exit 0: nothing that was asked for is known to be missing. Exit 7: something is. What cannot be established is shown
    as "unknown" with the flag that would tell.
    """
    from forebay.commands.requests import VerifyRequest

    request = VerifyRequest(target, log, server, probe_seconds, force, api_key or "")
    result = run(request, QuietOutput(), one_host(on, "verify"))
    if as_json:
        click.echo(json.dumps({"schema": 1, "in_effect": result["in_effect"], "rows": result["rows"]}))
    else:
        show_rows(result["rows"])
    return int(result["exit_code"])
