"""``forebay plan``: will it fit, before anything is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from forebay.cli._complete import model_names
from forebay.errors import ExitCode, UsageError
from forebay.sizes import parse_size

__all__ = ["command"]

_ENVIRONMENT = ("VLLM_CPU_KVCACHE_SPACE", "LMCACHE_MAX_LOCAL_CPU_SIZE")
"""Variables that size a server's pools."""


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_size(value, what=param.opts[0] if param else "size")


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Flags after -- are the server's own, in its own units: -- --hicache-size 48 --mem-fraction-static 0.85",
)
@click.argument("model", required=False, shell_complete=model_names)
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--server", type=click.Choice(["embedded", "sglang", "vllm"]), default="embedded", show_default=True)
@click.option(
    "--server-version", metavar="V", help="Rules of this version.  [default: the installed, else the newest known]"
)
@click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks.")
@click.option("--dp", type=int, metavar="N", help="Data-parallel replicas (SGLang: or attention groups).")
@click.option("--pp", type=int, metavar="N", help="Pipeline stages.")
@click.option("--dtype", metavar="D", help="Of the model's computation.")
@click.option("--kv-dtype", metavar="D", help="Of the KV cache, in the server's spelling.")
@click.option("--context", type=int, metavar="TOKENS", help="Longest request.  [default: the model's]")
@click.option("--concurrency", type=int, metavar="N", help="Full-length requests that must fit at once.")
@click.option("--host-cache", type=_Size(), metavar="SIZE", help="Host tier, in total over the ranks.")
@click.option("--device-cache", type=_Size(), metavar="SIZE", help="Embedded: device pool, in total over the ranks.")
@click.option("--weights-bytes", type=_Size(), metavar="SIZE", help="What the weights take when loaded, in total.")
@click.option(
    "--host-memory", type=_Size(), metavar="SIZE", help="Available host memory.  [default: read from this host]"
)
@click.option("--host-reserve", type=_Size(), metavar="SIZE", help="Kept of it.  [default: 10 GiB + 2 GB a rank]")
@click.option("--gpus", metavar="NxSIZE", help="GPUs of one host: 8x80GB.  [default: read through NVML]")
@click.option(
    "--machine", "machine_file", type=Path, metavar="FILE", help="Made by `forebay machine --json` elsewhere."
)
@click.option("--from-log", "log", type=Path, metavar="FILE", help="Recompute the numbers of a start-up log.")
@click.option("--model", "log_model", metavar="M", help="With --from-log: the model, where the log does not say.")
@click.option("--page-size", type=int, metavar="N", help="With --from-log: tokens a page, where the log does not say.")
@click.option("--explain", is_flag=True, help="Show the arithmetic line by line.")
@click.option(
    "--json", "as_json", is_flag=True, help="The plan as JSON (docs/plan.md); `forebay up plan.json` runs it."
)
def command(model: str | None, log: Path | None, as_json: bool, explain: bool, **options: Any) -> int:
    """Will MODEL (a folder, a GGUF file, a hub id, a name) fit? Exit 0 it does, 3 it does not."""
    if log is not None:
        return _from_log(log, options.pop("log_model") or model, as_json, options)
    options.pop("log_model"), options.pop("page_size")
    if model is None:
        raise UsageError("which model? give a folder, a .gguf file, a hub id or a name", fix="forebay plan smollm2")
    from forebay.machine.local import LocalMachine
    from forebay.planning.arithmetic.installed_version import version_of
    from forebay.planning.make_plan import PlanOptions, make_plan

    said = {
        "tp": options["tp"],
        "dp": options["dp"],
        "pp": options["pp"],
        "dtype": options["dtype"],
        "kv_dtype": options["kv_dtype"],
        "context": options["context"],
        "concurrency": options["concurrency"],
        "gpus": options["gpus"],
        "machine_file": options["machine_file"],
        "server_flags": options["server_flags"],
        "host_memory_bytes": options["host_memory"],
        "host_reserve_bytes": options["host_reserve"],
        "host_cache_bytes": options["host_cache"],
        "device_cache_bytes": options["device_cache"],
        "weights_bytes": options["weights_bytes"],
    }
    version = options["server_version"] or version_of(options["server"])
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    plan = make_plan(PlanOptions(model, options["server"], version, env=env, **said), LocalMachine())
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=2))
    else:
        from forebay.cli import _plan_view

        _plan_view.show(plan, explain=explain)
    return int(ExitCode.DONE if plan.fits else ExitCode.REFUSED)


def _from_log(path: Path, model: str | None, as_json: bool, options: dict[str, Any]) -> int:
    from forebay.planning.log_check.check import check_log

    report = check_log(
        path,
        model=model,
        tp=options["tp"],
        dtype=options["kv_dtype"] or options["dtype"],
        page_size=options["page_size"],
    )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        from forebay.cli import _plan_view

        _plan_view.show_log(report)
    return int(ExitCode.DONE)
