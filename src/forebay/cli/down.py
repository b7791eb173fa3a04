"""``forebay down``: end a run and check that nothing is left."""

from __future__ import annotations

import json

import click

from forebay.cli._complete import run_names
from forebay.errors import ExitCode

__all__ = ["command"]


@click.command("down", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", shell_complete=run_names)
@click.option("--drain-seconds", type=float, help="Time for running requests to finish.  [default: 30]")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(name: str, drain_seconds: float | None, as_json: bool) -> int:
    """End the run NAME, and check that nothing of it is left.

    SIGTERM, time to drain, SIGKILL; engines without an API server too. Only processes that belong to the run are
    signalled. Then the checks: processes, port, device memory, /dev/shm, host memory. It works after the API server was
    killed, without the supervisor, and after a reboot.

    Exit 0: nothing is left. Exit 8: something is; the output says what, and who holds it.
    """
    from forebay.machine.local import LocalMachine
    from forebay.operation.stop.stop_run import stop_run
    from forebay.runs.run_record import open_run

    run = open_run(name)
    tell = (lambda _text: None) if as_json else click.echo
    report = stop_run(LocalMachine(), run, drain_s=drain_seconds, tell=tell)
    if as_json:
        checks = report.cleanup.checks if report.cleanup is not None else ()
        rows = [{"what": c.what, "ok": c.ok, "found": c.found, "fix": c.fix} for c in checks]
        click.echo(
            json.dumps({"schema": 2, "name": name, "clean": report.clean, "steps": report.steps, "checks": rows})
        )
    return int(ExitCode.DONE if report.clean else ExitCode.LEFT_BEHIND)
