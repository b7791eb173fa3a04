"""``forebay verify``: asked, effective, observed."""

from __future__ import annotations

import json

import click

from forebay.errors import ExitCode

__all__ = ["command"]


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="NAME|URL")
@click.option("--log", type=click.Path(exists=False), help="Its log: settings and pool sizes there count as effective.")
@click.option("--server", type=click.Choice(["embedded", "sglang", "vllm"]), help="Default: looked up.")
@click.option("--probe-seconds", default=60.0, show_default=True, help="The longest probe; 0 probes nothing.")
@click.option("--force", is_flag=True, help="Probe although requests of others run.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(target: str, log: str | None, server: str | None, probe_seconds: float, force: bool, as_json: bool) -> int:
    """Is what was asked for in effect at NAME|URL, and is the cache really read?

    Asked (the command line), effective (the server's own report, its log) and observed: a probe asks a prompt, evicts
    it from the device, asks again, and compares the tier's counters, the time to the first token and the output.
    It says first what that costs and whom it evicts, and does not run while others' requests do (--force).

    Exit 0 all that is known is in effect, 7 something asked for is not. What cannot be established is "unknown", and
    names the flag that would tell.
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
        subject = VerifyTarget(guess_server(machine, found), found.address, argv, found.log)
        report = verify(machine, subject, probe_s=probe_seconds, even_if_busy=force, tell=tell)
    if as_json:
        rows = [row.as_json() for row in report.rows]
        click.echo(json.dumps({"schema": 1, "in_effect": report.in_effect, "rows": rows}))
    else:
        click.echo("\n".join(report.lines()))
    return int(ExitCode.DONE if report.in_effect else ExitCode.NOT_IN_EFFECT)
