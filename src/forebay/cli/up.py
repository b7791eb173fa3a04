"""``forebay up``: plan, preflight, launch, watch, verify."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import click

from forebay.cli._complete import model_names
from forebay.cli._hosts import SECONDS, api_key_option, destinations, on_option, run
from forebay.cli._up_on_host import up_on_host, up_on_hosts
from forebay.commands.requests import UpRequest
from forebay.sizes import parse_size

__all__ = ["command"]


def _size(_context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    if value is None or (value == "auto" and parameter.name == "host_cache"):
        return value
    return parse_size(value, what=f"--{(parameter.name or '').replace('_', '-')}")


def _ports(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, int | None]:
    """``8000``, or ``8000-8009`` for the first free one of them."""
    first, dash, last = value.partition("-")
    numbers = [int(word) if word.isdecimal() else 0 for word in ([first, last] if dash else [first])]
    if not all(1 <= number <= 65535 for number in numbers) or numbers != sorted(numbers):
        raise click.BadParameter(f"{value!r} is no port (1 to 65535) and no range of ports such as 8000-8009")
    return numbers[0], numbers[1] if dash else None


@click.command("up", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", shell_complete=model_names)
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--server", type=click.Choice(["embedded", "sglang", "vllm"]), help="[default: embedded]")
@click.option("--name", help="Name of the run.  [default: MODEL-SERVER]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind.")
@click.option("--port", default="30000", show_default=True, callback=_ports, help="A range takes its first free port.")
@click.option("--served-model-name", "served_name", help="The model name that requests use.")
@click.option("--tp", type=click.IntRange(1), help="Ranks (tensor parallel).")
@click.option("--context", type=click.IntRange(1), help="Longest request, in tokens.")
@click.option(
    "--host-cache",
    callback=_size,
    help="Host tier, in total over the ranks, with a unit: 16GB. auto: small, at most 1GB.",
)
@click.option(
    "--device-cache", callback=_size, help="Device pool with a unit: 512MiB (embedded: in total; vLLM: per rank)."
)
@click.option("--write-policy", type=click.Choice(["write_through", "write_through_selective", "write_back"]))
@click.option("--python", help="The interpreter of the environment the server is installed in.")
@click.option("--ask", metavar="TEXT", help="Once ready, send this question; print the answer and example requests.")
@click.option("--detach", "-d", is_flag=True, help="Once ready and verified, leave it running under its supervisor.")
@click.option("--no-verify", is_flag=True, help="Do not probe the cache once it is ready.")
@click.option("--no-plan", is_flag=True, help="Launch what the plan would refuse.")
@click.option("--probe-seconds", type=SECONDS, default=60.0, show_default=True, help="The longest probe of verify.")
@click.option("--timeout", type=SECONDS, help="Stop waiting after this many seconds (exit 5).  [default: never]")
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
def command(**options: Any) -> int:
    """Start a server for MODEL (a folder, a file, a name) or a saved plan (plan.json), and check that it works.

    \b
    forebay up smollm2                                   the embedded server; Ctrl-C ends it
    forebay up /models/llama --server vllm --detach      leave it running; `forebay down` ends it
    forebay up MODEL --server sglang --tp 8 -- --hicache-size 48
    forebay up smollm2 --port 8000-8009 --host-cache auto --ask "What is the capital of France?"
    forebay up plan.json                                 run what `forebay plan --json` saved
    forebay up /models/llama --on gpu1 -- ...            on another machine, over SSH; its port is forwarded here

    Everything after -- goes to the server unchanged, in the server's own units, and overrides the options above. Flags
    that verify needs (--enable-metrics, --enable-prompt-tokens-details) are added and shown.

    What cannot work is refused (exit 3) before anything is loaded. "ready" means: the processes it started are alive,
    they own the port, health is 2xx and one real token came. Exit 4 dead, 5 --timeout passed, 6 stalled or hung, 7
    asked for but not in effect. In the foreground Ctrl-C ends the server and checks that nothing is left.
    """
    from forebay.cli._live import Screen
    from forebay.operation.start.up_options import UpOptions
    from forebay.runs.run_record import this_operator

    signal.signal(signal.SIGTERM, _as_interrupt)
    signal.signal(signal.SIGHUP, _as_interrupt)
    screen = Screen(as_json=options.pop("as_json"))
    (port, last_port), hosts = options.pop("port"), destinations(options.pop("on"))
    options["server_flags"], options["api_key"] = tuple(options["server_flags"]), options["api_key"] or ""
    given = UpOptions(**options, port=port, last_port=last_port, started_by=this_operator())
    try:
        if not hosts:
            return int(run(UpRequest(given), screen)["exit_code"])
        if len(hosts) == 1:
            return up_on_host(given, hosts[0], screen)
        return up_on_hosts(given, hosts, screen)
    finally:
        screen.close()


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
