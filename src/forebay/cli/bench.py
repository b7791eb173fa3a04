"""``forebay bench``: measure a server over HTTP, or compare two."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from forebay.cli._complete import run_names
from forebay.errors import UsageError
from forebay.workload.bench.settings import BenchSettings, CacheTemperature, Workload

__all__ = ["command"]


@click.command("bench")
@click.argument("targets", metavar="URL|NAME...", nargs=-1, shell_complete=run_names)
@click.option("--compare", "two", nargs=2, metavar="A B", help="Two addresses, runs, or plan files.")
@click.option("--rounds", default=8, show_default=True, help="Rounds per side, for --compare.")
@click.option(
    "--workload", type=click.Choice([w.value for w in Workload]), help="[default: chat, or by --trace/--prompts]"
)
@click.option(
    "--cache",
    type=click.Choice([c.value for c in CacheTemperature]),
    default="as-is",
    show_default=True,
    help="Cold: flushed and checked. Warm: the same requests are sent once before.",
)
@click.option("--concurrency", default=16, show_default=True, help="Closed loop: sessions in flight.")
@click.option("--rate", type=float, help="Open loop: sessions per second, Poisson.")
@click.option("--sessions", type=click.IntRange(min=1), help="At most so many sessions, requests, records or prompts.")
@click.option("--turns", default=4, show_default=True, help="Chat: turns per session.")
@click.option("--groups", default=4, show_default=True, help="Chat: number of different system prompts.")
@click.option("--system-tokens", default=512, show_default=True, help="Chat: length of a system prompt.")
@click.option("--user-tokens", default=64, show_default=True, help="Chat: length of a user message.")
@click.option("--input-tokens", default=512, show_default=True, help="Fixed: length of a prompt.")
@click.option("--output-tokens", default=128, show_default=True, help="Length of an answer.")
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar="FOREBAY_TRACE", help="Trace to replay [env: FOREBAY_TRACE]."
)
@click.option(
    "--block-tokens",
    default=512,
    show_default=True,
    help="Trace: tokens per 512-token block; fewer scale the trace down.",
)
@click.option("--speed", default=1.0, show_default=True, help="Trace: how many times faster than recorded.")
@click.option("--closed", is_flag=True, help="Trace: ignore its times, keep --concurrency requests in flight.")
@click.option(
    "--max-input-tokens", type=click.IntRange(min=1), help="Trace: leave out longer prompts; they are counted."
)
@click.option("--prompts", type=click.Path(path_type=Path), help="Your own JSONL: conversations or prompts.")
@click.option("--seed", type=int, help="The same prompts in every run [default: new ones].")
@click.option("--words", is_flag=True, help="Send words where token ids would be sent.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the most likely token at each step.")
@click.option("--model", help="[default: the one the server lists]")
@click.option("--api-key", envvar="FOREBAY_API_KEY", help="Bearer token [env: FOREBAY_API_KEY].")
@click.option("--json", "json_path", metavar="FILE", help="Write the result as JSON; - is stdout.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write the report.")
def command(targets: tuple[str, ...], two: tuple[str, str] | None, rounds: int, **options: Any) -> int:
    """Measure throughput, latencies and cached tokens per tier of a server: an address, or a run of `forebay up`.

    \b
    Try:
      forebay bench smollm2-embedded --cache cold --html report.html
      forebay bench http://127.0.0.1:8000 --workload fixed --input-tokens 1024 --concurrency 32
      forebay bench smollm2-embedded --workload trace --trace trace.jsonl --block-tokens 32 --speed 10
      forebay bench --compare run-a run-b
    """
    json_path, html_path = options.pop("json_path"), options.pop("html_path")
    settings = _settings(options)
    _check_writable(json_path, html_path)
    if two is not None:
        if targets:
            raise UsageError("--compare already names both sides", fix="leave the other targets out")
        _compare(two, settings, rounds, json_path, html_path)
    elif len(targets) == 1:
        _measure(targets[0], settings, json_path, html_path)
    else:
        raise UsageError("name one server to measure", fix="forebay bench URL|NAME, or --compare A B")
    return 0


def _check_writable(*paths: str | Path | None) -> None:
    """Refuse files that cannot be written, before anything is measured."""
    for path in paths:
        if path is None or path == "-":
            continue
        try:
            Path(path).open("a").close()
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", fix="name a file you may write") from error


def _settings(options: dict[str, Any]) -> BenchSettings:
    named = options.pop("workload")
    if named is None:
        # a trace from the environment is only the default of --trace; it does not choose the workload
        given = click.get_current_context().get_parameter_source("trace") is ParameterSource.COMMANDLINE
        named = "prompts" if options["prompts"] else "trace" if given else "chat"
    timed, tokens = not options.pop("closed"), not options.pop("words")
    return BenchSettings(
        workload=Workload(named), cache=CacheTemperature(options.pop("cache")), timed=timed, tokens=tokens, **options
    )


def _measure(target: str, settings: BenchSettings, json_path: str | None, html_path: Path | None) -> None:
    from forebay.workload.bench.report import report
    from forebay.workload.bench.run import measure
    from forebay.workload.loop import run_async
    from forebay.workload.target import resolve

    result = run_async(measure(target, resolve(target), settings, on_progress=_show_progress))
    _clear()
    _write_result(result.table(), result.as_json(), json_path, html_path, report(result) if html_path else "")


def _compare(
    two: tuple[str, str], settings: BenchSettings, rounds: int, json_path: str | None, html_path: Path | None
) -> None:
    from forebay.workload.bench.compare import compare
    from forebay.workload.bench.report import comparison_report
    from forebay.workload.loop import run_async

    comparison = run_async(compare(*two, settings, rounds=rounds, on_status=_show_status))
    _clear()
    page = comparison_report(comparison) if html_path else ""
    _write_result(comparison.table(), comparison.as_json(), json_path, html_path, page)


def _write_result(table: str, record: dict[str, Any], json_path: str | None, html_path: Path | None, page: str) -> None:
    text = json.dumps(record, default=str)
    if html_path is not None:
        html_path.write_text(page, encoding="utf-8")
    if json_path == "-":
        click.echo(text)
        return
    if json_path is not None:
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    click.echo(table)
    for path in (json_path, html_path):
        if path is not None:
            click.echo(f"  written: {path}")


def _show_progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty() and (done % 16 == 0 or done == total):
        click.echo(f"\r\x1b[K{what}: {done:,} of {total:,} requests", nl=False, err=True)


def _show_status(text: str) -> None:
    click.echo(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, nl=not sys.stderr.isatty(), err=True)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
