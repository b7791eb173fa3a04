"""``forebay doctor``: why a server failed, the evidence, and what to change."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay.cli._complete import runs_or_files
from forebay.cli._hosts import QuietOutput, on_option, one_host, run
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.operation.doctor import Diagnosis
    from forebay.operation.doctor.facts import HostFacts

__all__ = ["command"]

_SHOWN = 200


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, required=True, metavar="NAME|FILE…|-", shell_complete=runs_or_files)
@click.option(
    "--machine",
    "machine_file",
    type=Path,
    metavar="FILE",
    help="The machine that the log is from, made by `forebay machine --json` there.",
)
@click.option("--host-memory", metavar="SIZE", help="Its host memory (or the container's limit): 449GB.")
@click.option("--gpus", metavar="NxSIZE", help="Its GPUs: 8x80GB.")
@click.option("--shm", metavar="SIZE", help="The size of its /dev/shm: 64GB.")
@click.option("--exit-code", type=int, help="How the API server process ended, where you know it (137, -9, …).")
@click.option("--kernel-log", type=click.Path(), help="A file with the kernel log (`dmesg > FILE`) of the time.")
@click.option("--oom-kills", type=int, help="How far oom_kill in the cgroup's memory.events went up meanwhile.")
@on_option
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def command(
    names: tuple[str, ...],
    machine_file: Path | None,
    host_memory: str | None,
    gpus: str | None,
    shm: str | None,
    exit_code: int | None,
    kernel_log: str | None,
    oom_kills: int | None,
    on: tuple[str, ...],
    as_json: bool,
) -> int:
    """Say why a server failed: the cause and not its consequences, the lines that show it, and what to change.

    \b
    forebay doctor my-run                    a run of `forebay up`: its log, exit code, kernel log
    forebay doctor server.log                any log of the embedded server, SGLang or vLLM
    forebay doctor rank0.log rank1.log       several files are the ranks or nodes of one server
    kubectl logs POD | forebay doctor -      a log from a pipe, or pasted
    forebay doctor server.log --host-memory 449GB --gpus 8x80GB

    Logs may be compressed (gzip, zstd) and may come through Docker, Kubernetes, journald, Slurm, torchrun or Ray. With
    the machine's memory and GPUs the doctor compares what was asked for with what is there, and computes the value that
    fits this very launch.

    How sure an answer is stands beside it: `certain`, `likely`, or `unknown`, with the first error that nothing known
    explains. A log without a failure has no cause. Lines at the head of a file that start with # are not read. Codes
    are explained in docs/causes.md.

    Exit 0 it answered, 2 a file or run is not there.
    """
    from forebay.commands.requests import DoctorRequest
    from forebay.json_records import decode_record
    from forebay.operation.doctor.records import Diagnosis

    host = one_host(on, "doctor")
    if host is not None and "-" in names:
        raise UsageError("the log on the standard input is on this machine", fix="leave --on out")
    facts = asdict(_host_facts(machine_file, host_memory, gpus, shm))
    request = DoctorRequest(names, exit_code, kernel_log, oom_kills, facts)
    answer = decode_record(Diagnosis, run(request, QuietOutput(), host)["answer"])
    if as_json:
        click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
    else:
        click.echo("\n".join(_text(answer)))
    return 0


def _host_facts(machine_file: Path | None, host_memory: str | None, gpus: str | None, shm: str | None) -> HostFacts:
    """What the user says of the machine; what is given by an option replaces just that fact of the file."""
    from dataclasses import replace

    from forebay.machine.accelerators import given_gpus
    from forebay.machine.facts import load_facts
    from forebay.operation.doctor.facts import HostFacts, host_facts_of
    from forebay.sizes import parse_size

    facts = host_facts_of(load_facts(machine_file)) if machine_file is not None else HostFacts()
    if host_memory is not None:
        facts = replace(
            facts, host_memory_bytes=parse_size(host_memory, what="--host-memory"), host_available_bytes=None
        )
    if gpus is not None:
        facts = replace(facts, gpu_bytes=tuple(gpu.total_bytes for gpu in given_gpus(gpus)))
    if shm is not None:
        facts = replace(facts, shm_bytes=parse_size(shm, what="--shm"))
    return facts


def _text(answer: Diagnosis) -> list[str]:
    up = {True: "yes", False: "no", None: "the log does not show it"}[answer.came_up]
    sure = f" ({answer.confidence})" if answer.cause and answer.cause != "unknown" else ""
    lines = [f"cause: {answer.cause or 'none'}{sure}", f"  {answer.meaning}"]
    if answer.fix:
        lines += ["fix:", f"  {answer.fix}"]
    if answer.evidence:
        lines.append("evidence:")
        for item in answer.evidence:
            place = f"{item.source}:{item.line}" if item.line is not None else item.source
            lines.append(f"  {place}  {_short(item.text)}")
    if answer.runner_up:
        lines += ["not chosen:", f"  {answer.runner_up.cause}: {answer.runner_up.why}"]
    if answer.ruled_out:
        lines.append("ruled out:")
        lines += [f"  {item.cause}: {item.why}" for item in answer.ruled_out]
    if answer.others:
        lines.append(f"also: {', '.join(answer.others)}")
    where = f"; stage: {answer.stage}" if answer.stage else ""
    rank = f", rank {answer.rank}" if answer.rank is not None else ""
    lines.append(f"server: {answer.server}; came up: {up}{where}{rank}")
    if answer.cause:
        lines.append(f"more: docs/causes.md#{answer.cause}")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
