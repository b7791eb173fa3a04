"""``forebay doctor``: why a server failed, the evidence, and what to change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from forebay.operation.doctor import Diagnosis

__all__ = ["command"]

_SHOWN = 200


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, required=True, metavar="NAME|FILE…")
@click.option("--exit-code", type=int, help="How the front process ended, where you know it (137, -9, …).")
@click.option("--kernel-log", type=click.Path(), help="A file with the kernel log (`dmesg > FILE`) of the time.")
@click.option("--oom-kills", type=int, help="How far oom_kill in the cgroup's memory.events went up meanwhile.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def command(
    names: tuple[str, ...], exit_code: int | None, kernel_log: str | None, oom_kills: int | None, as_json: bool
) -> int:
    """Say why a server failed: the cause and not its fallout, the lines that show it, and what to change.

    \b
    forebay doctor my-run                    a run of `forebay up`: its log, exit code, kernel log
    forebay doctor server.log                any log of the embedded server, SGLang or vLLM
    forebay doctor rank0.log rank1.log       several files are the ranks of one server

    `unknown` is an answer; a log without a failure has no cause. Lines at the head of a file that start with # are not
    read. Codes are explained in docs/causes.md.

    Exit 0 it answered, 2 a file or run is not there.
    """
    from forebay.machine.local import LocalMachine
    from forebay.operation.doctor import Observations
    from forebay.operation.doctor.read_log import read_lines
    from forebay.operation.doctor.run_folder import diagnose_named

    lines = read_lines(kernel_log) if kernel_log else ()
    observed = Observations(exit_code=exit_code, kernel_lines=lines, oom_kills=oom_kills)
    answer = diagnose_named(LocalMachine(), names, observed)
    if as_json:
        click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
    else:
        click.echo("\n".join(_text(answer)))
    return 0


def _text(answer: Diagnosis) -> list[str]:
    up = {True: "yes", False: "no", None: "the log does not show it"}[answer.came_up]
    lines = [f"cause: {answer.cause or 'none'}", f"  {answer.meaning}"]
    if answer.fix:
        lines += ["fix:", f"  {answer.fix}"]
    if answer.evidence:
        lines.append("evidence:")
        for item in answer.evidence:
            place = f"{item.source}:{item.line}" if item.line is not None else item.source
            lines.append(f"  {place}  {_short(item.text)}")
    if answer.ruled_out:
        lines.append("ruled out:")
        lines += [f"  {item.cause}: {item.why}" for item in answer.ruled_out]
    if answer.others:
        lines.append(f"also: {', '.join(answer.others)}")
    lines.append(f"server: {answer.server}; came up: {up}")
    if answer.cause:
        lines.append(f"more: docs/causes.md#{answer.cause}")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
