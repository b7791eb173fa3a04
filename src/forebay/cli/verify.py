"""``forebay verify``: is the cache in effect: asked, effective, observed."""

from __future__ import annotations

import json

import click

from forebay.cli._complete import run_names
from forebay.cli._verify_view import show_rows
from forebay.errors import ExitCode

__all__ = ["command"]


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="NAME|URL", shell_complete=run_names)
@click.option(
    "--log", type=click.Path(exists=False), help="The server's log; settings and pool sizes in it count as effective."
)
@click.option("--server", type=click.Choice(["embedded", "sglang", "vllm"]), help="[default: detected]")
@click.option("--probe-seconds", default=60.0, show_default=True, help="The longest probe; 0 sends none.")
@click.option("--force", is_flag=True, help="Probe while requests of others run; it evicts their pages.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(target: str, log: str | None, server: str | None, probe_seconds: float, force: bool, as_json: bool) -> int:
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
    from forebay.machine.local import LocalMachine
    from forebay.operation.verify.verify import VerifyTarget, verify, verify_run
    from forebay.operation.watch.target import guess_server, listener_argv, target_of

    def tell(text: str) -> None:
        click.echo(text, err=True)

    machine = LocalMachine()
    found = target_of(machine, target, log=log, server=server)
    if found.run is not None and log is None and not force:
        report = verify_run(machine, found.run, probe_s=probe_seconds, tell=tell)
    else:
        argv = listener_argv(machine, found.address)
        server_to_verify = VerifyTarget(guess_server(machine, found), found.address, argv, found.log)
        report = verify(machine, server_to_verify, probe_s=probe_seconds, force=force, tell=tell)
    rows = [row.as_json() for row in report.rows]
    if as_json:
        click.echo(json.dumps({"schema": 1, "in_effect": report.in_effect, "rows": rows}))
    else:
        show_rows(rows)
    return int(ExitCode.DONE if report.in_effect else ExitCode.NOT_IN_EFFECT)
