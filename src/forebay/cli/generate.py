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
_DEFAULTS = FilterPolicy.default()


class _ActionType(click.Choice[str]):
    """The actions of a quality filter; ``set-aside``, the former name of ``reject``, is still accepted."""

    def __init__(self) -> None:
        super().__init__([action.value for action in FilterAction])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert("reject" if value == "set-aside" else value, param, ctx)


def _filter_option(name: QualityFilter, text: str) -> Callable[[_Command], _Command]:
    flag = "--on-" + name.value.replace("_", "-")
    return click.option(flag, type=_ActionType(), default=_DEFAULTS.actions[name].value, show_default=True, help=text)


@click.command("generate")
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="x.jsonl, x.parquet, or a folder.")
@click.option("-s", "--server", "servers", multiple=True, help="Address or run name; repeat it for several servers.")
@click.option("--up", metavar="PLAN|MODEL", help="Start the server with `forebay up`, and again when it dies.")
@click.option("--model", help="Model name to ask for [default: the one the server lists].")
@click.option("--api-key", envvar="FOREBAY_API_KEY", help="Bearer token [env: FOREBAY_API_KEY].")
@click.option("--max-tokens", default=2048, show_default=True, help="Longest answer, in tokens.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the most likely token at each step.")
@click.option("--top-p", type=float, help="[default: the server's]")
@click.option("--top-k", type=int, help="[default: the server's]")
@click.option("--seed", type=int, help="Make sampled answers repeatable.")
@click.option("--extra-body", metavar="JSON", help="Further request fields, such as chat_template_kwargs.")
@_filter_option(QualityFilter.TRUNCATED, "Answers truncated at --max-tokens.")
@_filter_option(QualityFilter.EMPTY, "Answers without text.")
@_filter_option(QualityFilter.REPEATING, "Answers that end in a loop.")
@_filter_option(QualityFilter.UNCLOSED_REASONING, "Answers whose reasoning does not end.")
@click.option(
    "--filter-retries",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Requests after the first one, for `retry`.",
)
@click.option("--gate-retries", "old_filter_retries", type=click.IntRange(min=0), hidden=True)
@click.option("--field", "field_name", help="Field with the conversation or prompt [default: the usual names].")
@click.option("--split", help="Split of a dataset folder.")
@click.option("--limit", type=click.IntRange(min=1), help="Read only the first so many rows.")
@click.option(
    "--format", "output_format", type=click.Choice(["jsonl", "parquet"]), help="[default: by name, else jsonl]"
)
@click.option("--shard-rows", type=click.IntRange(min=1), default=100_000, show_default=True, help="Rows per shard.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests in flight per server [default: measured].")
@click.option(
    "--max-concurrency",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Upper bound of the measured concurrency.",
)
@click.option(
    "--row-tries", type=click.IntRange(min=1), default=5, show_default=True, help="Errors after which a row is failed."
)
@click.option("--server-wait", default=600.0, show_default=True, help="Seconds without any server before the run ends.")
@click.option("--allow-change", is_flag=True, help="Continue although model, settings or sampling changed.")
@click.option("--json", "as_json", is_flag=True, help="Events as JSON lines on stdout.")
def command(**options: Any) -> int:
    """Generate every assistant turn of INPUT anew, from a served model.

    INPUT is JSONL, Parquet or a Hugging Face dataset folder, with ShareGPT or OpenAI conversations or plain prompts.
    The same command continues an interrupted run: finished turns are not generated again, and no row is lost or
    doubled.

    \b
    Try:
      forebay generate prompts.jsonl -o out.jsonl -s http://127.0.0.1:8000
      forebay generate data/ -o out/ -s run-a -s run-b --max-tokens 4096
    """
    as_json = options.pop("as_json")
    settings = _settings(options)
    outcome = run_job(settings, lambda total: Progress(total, as_json=as_json))
    if as_json:
        click.echo(json.dumps(_record(outcome)))
    else:
        _print_outcome(outcome)
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
    actions = {name: FilterAction(options.pop(f"on_{name.value}")) for name in QualityFilter}
    retries, old_retries = options.pop("filter_retries"), options.pop("old_filter_retries")
    filters = FilterPolicy(actions, retries=retries if old_retries is None else old_retries)
    servers, up = options.pop("servers"), options.pop("up")
    if not servers and not up:
        raise UsageError("no server is named", fix="--server http://HOST:PORT, --server RUN, or --up PLAN")
    addresses = tuple(dict.fromkeys(resolve(name) for name in servers)) or (up_address(up),)
    server_wait = options.pop("server_wait")
    return GenerateSettings(
        servers=addresses, up=up, sampling=sampling, filters=filters, server_wait_s=server_wait, **options
    )


def _record(outcome: JobOutcome) -> dict[str, Any]:
    counts, written = outcome.counts, outcome.written
    return {
        "schema": 2,
        "event": "interrupted" if outcome.interrupted else "finished",
        "rows": {
            "input": counts.input,
            "ok": counts.ok,
            "rejected": counts.rejected,
            "failed": counts.failed,
            "pending": counts.pending,
        },
        "turns_here": outcome.tally.turns,
        "fingerprint_changes": outcome.changes,
        "files": [str(path) for path in written.files] if written else [],
        "manifest": str(written.manifest) if written else None,
    }


def _print_outcome(outcome: JobOutcome) -> None:
    counts, written = outcome.counts, outcome.written
    if written is None:
        done = counts.input - counts.pending
        click.echo(f"stopped: {done:,} of {counts.input:,} rows are finished; the same command continues")
        return
    click.echo(
        f"{counts.ok:,} ok + {counts.rejected:,} rejected + {counts.failed:,} failed = {counts.input:,} input rows; "
        f"{outcome.tally.turns:,} turns generated by this command"
    )
    if written.reasons:
        click.echo("  rejected: " + ", ".join(f"{reason} {n:,}" for reason, n in sorted(written.reasons.items())))
    for path in (*written.files, written.rejected, written.failed, written.manifest):
        if path is not None:
            click.echo(f"  {path}")
    if counts.failed:
        click.echo("the same command tries failed rows again")
