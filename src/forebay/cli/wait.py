"""``forebay wait``: wait until a server is ready, and show what it is doing."""

from __future__ import annotations

import click

from forebay.cli._complete import run_names

__all__ = ["command"]


@click.command("wait", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="NAME|URL", shell_complete=run_names)
@click.option("--pid", type=int, help="The process that must become the server.  [default: the listener]")
@click.option("--log", type=click.Path(exists=False), help="The server's log, followed for stages and errors.")
@click.option("--server", type=click.Choice(["embedded", "sglang", "vllm"]), help="[default: detected]")
@click.option("--timeout", type=float, help="Give up after this many seconds (exit 5).  [default: never]")
@click.option("--hang-seconds", default=120.0, show_default=True, help="CPU time but no token for this long is a hang.")
@click.option("--stall-seconds", default=300.0, show_default=True, help="Nothing moving for this long is a stall.")
@click.option("--json", "as_json", is_flag=True, help="One event per line on stdout.")
def command(
    target: str,
    pid: int | None,
    log: str | None,
    server: str | None,
    timeout: float | None,
    hang_seconds: float,
    stall_seconds: float,
    as_json: bool,
) -> int:
    """Wait until the server at NAME|URL is ready: its process lives, it owns the port, health is 2xx, one token came.

    \b
    forebay wait http://127.0.0.1:30000
    forebay wait :8000 --pid 4242 --log server.log --timeout 1800
    forebay wait my-run

    The status of /health decides, never its body (SGLang and vLLM answer 200 with an empty one). With --pid, another
    process on the port is never taken for the server. Without it, the listener is looked up and named; while nothing
    listens the state is "unknown", not "dead".

    Exit 0 ready, 4 dead (with the cause), 5 time is up (with the last stage), 6 hung or stalled.
    """
    from forebay.cli._live import Screen
    from forebay.machine.local import LocalMachine
    from forebay.operation.wait import WaitOptions, wait_for
    from forebay.operation.watch.health_state import Limits
    from forebay.operation.watch.target import target_of

    machine = LocalMachine()
    screen = Screen(as_json=as_json)
    waiting = WaitOptions(timeout, Limits(hang_s=hang_seconds, stall_s=stall_seconds))
    try:
        return int(
            wait_for(machine, target_of(machine, target, pid=pid, log=log, server=server), waiting, screen.event)
        )
    finally:
        screen.close()
