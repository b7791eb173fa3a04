"""``forebay forward``: a server's port on another machine as a port of this one."""

from __future__ import annotations

import threading

import click

from forebay.cli._hosts import QuietOutput, on_option, one_host, run
from forebay.errors import UsageError

__all__ = ["command"]


@click.command("forward", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="NAME|PORT")
@click.option("--port", "local_port", type=click.IntRange(1, 65535), help="Port here.  [default: the same, if free]")
@on_option
def command(target: str, local_port: int | None, on: tuple[str, ...]) -> int:
    """Reach the server NAME (a run), or a port, of another machine from here, until Ctrl-C.

    \b
    forebay forward my-run --on gpu1
    forebay forward 8000 --on root@pve,lxc:101 --port 9000

    The port comes back by itself after the connection was lost.
    """
    from forebay.commands.requests import ResolveRequest
    from forebay.remote.port_forward import open_forward
    from forebay.remote.transport import Transport

    host = one_host(on, "forward")
    if host is None:
        raise UsageError("forward to which machine?", fix="--on HOST")
    found = run(ResolveRequest(target), QuietOutput(), host)
    forward = open_forward(
        Transport(host),
        found["host"],
        found["port"],
        local_port=local_port,
        tell=lambda text: click.echo(text, err=True),
    )
    click.echo(f"{target} on {host.name} is at {forward.url} (Ctrl-C ends the forward, not the server)")
    try:
        threading.Event().wait()
    finally:
        forward.close()
    return 0
