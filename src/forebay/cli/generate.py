"""``forebay generate``: a data set from a served model, exactly once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from forebay.errors import ExitCode, UsageError
from forebay.workload.generate.job import JobOutcome, run_job
from forebay.workload.generate.progress import Progress
from forebay.workload.generate.quality_filters import FilterAction, FilterPolicy, QualityFilter
from forebay.workload.generate.settings import GenerateSettings, Sampling
from forebay.workload.target import resolve, up_address

__all__ = ["command"]

_Command = Callable[..., int]
_ACTIONS = click.Choice([action.value for action in FilterAction])
_DEFAULTS = FilterPolicy.default()


def _gate_option(gate: QualityFilter, text: str) -> Callable[[_Command], _Command]:
    flag = "--on-" + gate.value.replace("_", "-")
    default = _DEFAULTS.actions[gate].value
    return click.option(flag, type=_ACTIONS, default=default, show_default=True, help=text)


@click.command("generate")
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="x.jsonl, x.parquet, or a folder.")
@click.option("-s", "--server", "servers", multiple=True, help="Address or run; repeat for several servers.")
@click.option("--up", metavar="PLAN|MODEL", help="Start the server with `forebay up`, and again when it dies.")
@click.option("--model", help="Model name to ask for [default: the one the server lists].")
@click.option("--api-key", envvar="FOREBAY_API_KEY", help="Bearer token [env: FOREBAY_API_KEY].")
@click.option("--max-tokens", default=2048, show_default=True, help="Longest answer, in tokens.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int, help="Make sampled answers repeatable.")
@click.option("--extra-body", metavar="JSON", help="Further request fields, such as chat_template_kwargs.")
@_gate_option(QualityFilter.TRUNCATED, "Answers cut at --max-tokens.")
@_gate_option(QualityFilter.EMPTY, "Answers without text.")
@_gate_option(QualityFilter.REPEATING, "Answers that end in a loop.")
@_gate_option(QualityFilter.UNCLOSED_REASONING, "Reasoning that never ends.")
@click.option("--gate-retries", default=2, show_default=True, help="Asks after the first one, for `retry`.")
@click.option("--field", "field_name", help="Field with the conversation or prompt [default: the usual names].")
@click.option("--split", help="Split of a dataset folder.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many rows.")
@click.option(
    "--format", "output_format", type=click.Choice(["jsonl", "parquet"]), help="[default: by name, else jsonl]"
)
@click.option("--shard-rows", type=click.IntRange(min=1), default=100_000, show_default=True, help="Rows in a shard.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests in flight per server [default: measured].")
@click.option("--max-concurrency", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option(
    "--row-tries", type=click.IntRange(min=1), default=5, show_default=True, help="Errors before a row fails."
)
@click.option("--server-wait", default=600.0, show_default=True, help="Seconds without any server before giving up.")
@click.option("--allow-change", is_flag=True, help="Continue although model, settings or sampling changed.")
@click.option("--json", "as_json", is_flag=True, help="Events as JSON lines on stdout.")
def command(**options: Any) -> int:
    """Generate every assistant turn of INPUT anew, from a served model.

    INPUT is JSONL, Parquet or a Hugging Face dataset folder, with ShareGPT or OpenAI conversations or plain prompts.
    The same command continues an interrupted run: finished turns are never asked for again, and no row is lost or
    doubled.

    \b
    Try:
      forebay generate prompts.jsonl -o out.jsonl -s http://127.0.0.1:8000
      forebay generate data/ -o out/ -s run-a -s run-b --max-tokens 4096
    """
    as_json = options.pop("as_json")
    settings = _settings(options)
    outcome = run_job(settings, lambda total: Progress(total, as_json=as_json))
    _report(settings, outcome, as_json)
    if outcome.interrupted:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.FAILED_ROWS if outcome.counts.failed else ExitCode.DONE)


def _settings(options: dict[str, Any]) -> GenerateSettings:
    extra = options.pop("extra_body")
    try:
        parsed = json.loads(extra) if extra else {}
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}", fix="""--extra-body '{"min_p": 0.1}'""") from error
    if not isinstance(parsed, dict):
        raise UsageError("--extra-body is not a JSON object", fix="""--extra-body '{"min_p": 0.1}'""")
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    sampling = Sampling(**{name: options.pop(name) for name in names}, extra=parsed)
    actions = {gate: FilterAction(options.pop(f"on_{gate.value}")) for gate in QualityFilter}
    gates = FilterPolicy(actions, retries=options.pop("gate_retries"))
    servers, up = options.pop("servers"), options.pop("up")
    if not servers and not up:
        raise UsageError("no server to ask", fix="--server http://HOST:PORT, --server RUN, or --up PLAN")
    addresses = tuple(dict.fromkeys(resolve(name) for name in servers)) or (up_address(up),)
    server_wait = options.pop("server_wait")
    return GenerateSettings(
        servers=addresses, up=up, sampling=sampling, gates=gates, server_wait_s=server_wait, **options
    )


def _report(settings: GenerateSettings, outcome: JobOutcome, as_json: bool) -> None:
    counts = outcome.counts
    if as_json:
        files = [str(path) for path in outcome.written.files] if outcome.written else []
        record = {
            "schema": 1,
            "event": "interrupted" if outcome.interrupted else "finished",
            "rows": {
                "input": counts.input,
                "ok": counts.ok,
                "set_aside": counts.set_aside,
                "failed": counts.failed,
                "pending": counts.pending,
            },
            "turns_here": outcome.tally.turns,
            "fingerprint_changes": outcome.changes,
            "files": files,
            "manifest": str(outcome.written.manifest) if outcome.written else None,
        }
        click.echo(json.dumps(record))
        return
    if outcome.written is None:
        done = counts.input - counts.pending
        click.echo(f"stopped: {done:,} of {counts.input:,} rows are finished; the same command continues")
        return
    click.echo(
        f"{counts.ok:,} ok + {counts.set_aside:,} set aside + {counts.failed:,} failed = {counts.input:,} input rows; "
        f"{outcome.tally.turns:,} turns asked for now"
    )
    if outcome.written.reasons:
        click.echo("  set aside: " + ", ".join(f"{why} {n:,}" for why, n in sorted(outcome.written.reasons.items())))
    for path in (*outcome.written.files, outcome.written.set_aside, outcome.written.failed, outcome.written.manifest):
        if path is not None:
            click.echo(f"  {path}")
    if counts.failed:
        click.echo("failed rows are tried again by the same command")
