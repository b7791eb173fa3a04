"""`python -m forebay.engine`: the embedded server as a process of its own; `forebay serve` becomes this one.

The order matters for the start: parse, open the port, start rank 0, and only then import what HTTP needs, while rank 0
imports torch.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, cast, get_args

import click

from forebay.engine import config as settings
from forebay.engine.cache.config import CacheConfig, Eviction, LoadPolicy, WritePolicy
from forebay.engine.config import (
    EngineConfig,
    HttpConfig,
    ModelConfig,
    ProcessConfig,
    SchedulerConfig,
)
from forebay.errors import ExitCode, ForebayError
from forebay.sizes import parse_size

__all__ = ["command", "main"]

_STARTED_AT = time.time()
_CACHE, _SCHEDULER, _PROCESS, _HTTP = CacheConfig(), SchedulerConfig(), ProcessConfig(), HttpConfig()


class _Size(click.ParamType[int]):
    """Bytes with a unit; one without is refused, showing both readings."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_size(value, what=param.opts[0] if param else "size")


def _choice(kind: Any) -> click.Choice[str]:
    """The values of a Literal or of a StrEnum."""
    return click.Choice(list(get_args(kind)) or [item.value for item in kind])


_log_format_option = click.option(
    "--log-format",
    type=_choice(settings.LogFormat),
    default=_PROCESS.log_format,
    show_default=True,
    help="Lines for people, or one JSON object per line.",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("model")
@click.option("--host", default=_HTTP.host, show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option("--port", default=_HTTP.port, show_default=True, help="Port to listen on.")
@click.option("--api-key", envvar="FOREBAY_API_KEY", help="Clients must send it as a bearer token.")
@click.option("--served-model-name", metavar="NAME", help="The name clients use.  [default: MODEL as given]")
@click.option(
    "--context-length", type=int, metavar="TOKENS", help="Prompt and output of one request.  [default: the model's]"
)
@click.option(
    "--dtype", type=_choice(settings.DType), default="auto", show_default=True, help="auto: the checkpoint's."
)
@click.option("--threads", type=int, help="Compute threads of all ranks together.  [default: the cores it may use]")
@click.option("--tp", default=_PROCESS.tp, show_default=True, help="Ranks, one process each (tensor parallel).")
@click.option("--page-size", default=_CACHE.page_size, show_default=True, help="Token slots a page.")
@click.option(
    "--device-cache",
    type=_Size(),
    help="KV pool the model reads, over all ranks.  [default: 1/8 of free memory, at most 1GiB]",
)
@click.option(
    "--host-cache", type=_Size(), default=0, help="KV in host RAM behind it, in total for the node.  [default: none]"
)
@click.option("--disk-cache", metavar="DIR", help="Folder for KV on disk; survives restarts. Needs --disk-size.")
@click.option("--disk-size", type=_Size(), default=0, help="How much of that disk may be used.")
@click.option(
    "--write-policy",
    type=_choice(WritePolicy),
    default=_CACHE.write_policy.value,
    show_default=True,
    help="When pages are backed up: at once, at their second use, or when evicted.",
)
@click.option(
    "--eviction",
    type=_choice(Eviction),
    default=_CACHE.eviction.value,
    show_default=True,
    help="What goes first when a pool is full. cost: what is cheapest to recompute and least likely to be asked.",
)
@click.option(
    "--load",
    type=_choice(LoadPolicy),
    default=_CACHE.load.value,
    show_default=True,
    help="Load a prefix from host or disk, or recompute it. auto: whichever was measured to be faster.",
)
@click.option("--max-running", default=_SCHEDULER.max_running, show_default=True, help="Sequences computed at once.")
@click.option("--max-queue", default=_SCHEDULER.max_queue, show_default=True, help="Sequences that may wait; then 429.")
@click.option(
    "--chunk-size",
    default=_SCHEDULER.chunk_size,
    show_default=True,
    help="Most prompt tokens computed in one step; fewer where measured step times ask for it.",
)
@click.option(
    "--drain-seconds", default=_PROCESS.drain_s, show_default=True, help="SIGTERM waits so long for requests."
)
@click.option(
    "--max-connections",
    default=_HTTP.max_connections,
    show_default=True,
    help="Connections at once; one more gets 503. Fewer where `ulimit -n` allows no more.",
)
@click.option(
    "--client-timeout",
    default=_HTTP.client_timeout_s,
    show_default=True,
    help="Seconds a client may take to send a request's head, or leave a part of its answer unread.",
)
@click.option(
    "--rank-timeout",
    default=_PROCESS.rank_timeout_s,
    show_default=True,
    help="Seconds without heartbeat and CPU after which a rank is hung.",
)
@_log_format_option
def command(**given: Any) -> int:
    """Serve MODEL over HTTP with OpenAI's API, in the foreground, until SIGTERM or Ctrl-C.

    MODEL is a Hugging Face folder (safetensors), a GGUF file, `smollm2` (a small real model, fetched once), or a hub
    id.

    \b
    Try:
      forebay serve smollm2 --port 8000
      curl -s localhost:8000/health             503 with stage and progress, then 200
      curl -s localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}]}'
      forebay serve ./Qwen3-8B --device-cache 8GB --host-cache 64GB --disk-cache /data/kv --disk-size 500GB

    \b
    Also there: / (a page), /metrics, /server_info, /cache, POST /flush_cache?tier=device, /health_generate.
    Sizes need a unit: 48GB is 48 x 10^9 bytes, 48GiB is 48 x 2^30.
    """
    return _serve(_config(given))


def _config(given: dict[str, Any]) -> EngineConfig:
    """One checked record from the options.

    Raises:
        UsageError: a value that cannot work.
    """
    return EngineConfig(
        model=ModelConfig(
            model=given["model"],
            dtype=given["dtype"],
            context_length=given["context_length"],
            threads=given["threads"],
        ),
        cache=CacheConfig(
            page_size=given["page_size"],
            device_bytes=given["device_cache"],
            host_bytes=given["host_cache"],
            disk_dir=given["disk_cache"],
            disk_bytes=given["disk_size"],
            write_policy=WritePolicy(given["write_policy"]),
            eviction=Eviction(given["eviction"]),
            load=LoadPolicy(given["load"]),
        ),
        scheduler=SchedulerConfig(
            max_running=given["max_running"], max_queue=given["max_queue"], chunk_size=given["chunk_size"]
        ),
        process=ProcessConfig(
            tp=given["tp"],
            rank_timeout_s=given["rank_timeout"],
            drain_s=given["drain_seconds"],
            log_format=given["log_format"],
        ),
        http=HttpConfig(
            host=given["host"],
            port=given["port"],
            api_key=given["api_key"],
            served_model_name=given["served_model_name"],
            max_connections=given["max_connections"],
            client_timeout_s=given["client_timeout"],
        ),
    ).check()


def _serve(config: EngineConfig) -> int:
    from forebay.engine.api.http.listener import open_listener

    listener = open_listener(config.http.host, config.http.port)

    from forebay.engine.api.engine_client import EngineClient
    from forebay.engine.api.worker_processes import WorkerGroup
    from forebay.engine.events import EventLog
    from forebay.engine.ipc.sockets import Endpoints
    from forebay.engine.worker.process import name_process

    name_process("forebay::front")
    log = EventLog(config.process.log_format)
    endpoints = Endpoints.create()
    try:
        engine = EngineClient(endpoints)
        workers = WorkerGroup(config, endpoints, _available_bytes())
        workers.spawn(0)
        from forebay.engine.api.api_server import run_server

        return run_server(config, listener, engine, workers, endpoints, log, _STARTED_AT)
    finally:
        endpoints.remove()


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@_log_format_option
def _only_log_format(log_format: str) -> None:
    """The one option that decides how a refusal of all the others is written."""


def _log_format(arguments: Sequence[str]) -> settings.LogFormat:
    """``--log-format`` as the parser reads it, also where another option is wrong."""
    with _only_log_format.make_context("serve", list(arguments), resilient_parsing=True) as context:
        given = context.params["log_format"]
    return cast(settings.LogFormat, given if given in get_args(settings.LogFormat) else _PROCESS.log_format)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM before the server handles signals itself: end, removing what was made so far."""
    raise SystemExit(int(ExitCode.DONE))


def _available_bytes() -> int | None:
    """Memory that can be allocated on this machine now; None where it cannot be read."""
    from forebay.hostmemory.available import read_available_memory

    try:
        return read_available_memory().available_bytes
    except OSError:
        return None


def main() -> None:
    """Entry point of the process: known failures become one line and an exit code."""
    signal.signal(signal.SIGTERM, _end_at_once)
    try:
        code = command.main(prog_name="forebay serve", standalone_mode=False)
    except ForebayError as error:
        _refuse(error.message, error.fix, error.code)
        code = error.exit_code
    except click.exceptions.Abort:
        code = ExitCode.INTERRUPTED
    except click.ClickException as error:
        if _log_format(sys.argv[1:]) == "json":
            _refuse(error.format_message(), "see `forebay serve --help`", None)
        else:
            error.show()
        code = ExitCode.USAGE
    sys.exit(int(code or 0))


def _refuse(reason: str, fix: str | None, code: str | None) -> None:
    from forebay.engine.events import EventLog

    EventLog(_log_format(sys.argv[1:])).error("refused", code=code, reason=reason, fix=fix)


if __name__ == "__main__":
    main()
