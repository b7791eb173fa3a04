"""``forebay wait``: wait until a server is ready, and show what it is doing."""

from __future__ import annotations

import click

from forebay.cli._complete import run_names
from forebay.cli._hosts import SECONDS, api_key_option, on_option, one_host, run

__all__ = ["command"]


@click.command("wait", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="NAME|URL", shell_complete=run_names)
@click.option(
    "--pid", type=click.IntRange(1, 2**22), help="The process that must become the server.  [default: the listener]"
)
@click.option("--log", type=click.Path(exists=False), help="The server's log, followed for stages and errors.")
@click.option("--server", type=click.Choice(["embedded", "sglang", "vllm"]), help="[default: detected]")
@click.option("--timeout", type=SECONDS, help="Give up after this many seconds (exit 5).  [default: never]")
@click.option(
    "--hang-seconds",
    type=SECONDS,
    default=120.0,
    show_default=True,
    help="CPU time but no token for this long is a hang.",
)
@click.option(
    "--stall-seconds", type=SECONDS, default=300.0, show_default=True, help="Nothing moving for this long is a stall."
)
@api_key_option
@on_option
@click.option("--json", "as_json", is_flag=True, help="One event per line on stdout.")
def command(
    target: str,
    pid: int | None,
    log: str | None,
    server: str | None,
    timeout: float | None,
    hang_seconds: float,
    stall_seconds: float,
    api_key: str | None,
    on: tuple[str, ...],
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
    from forebay.commands.requests import WaitRequest

    request = WaitRequest(target, pid, log, server, timeout, hang_seconds, stall_seconds, api_key or "")
    screen = Screen(as_json=as_json)
    try:
        return int(run(request, screen, one_host(on, "wait"))["exit_code"])
    finally:
        screen.close()
