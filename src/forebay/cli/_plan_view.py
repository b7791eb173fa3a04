"""How a plan looks on a terminal: what, per rank, in total, and how each number was obtained."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forebay.sizes import format_binary, format_size

if TYPE_CHECKING:
    from forebay.planning.log_check.report import LogReport
    from forebay.planning.plan import Plan, Quantity

__all__ = ["show", "show_log"]


_WIDE = 130
"""From this terminal width on the table has room for each number's source in words."""


def show(plan: Plan, *, explain: bool) -> None:
    """Print ``plan``; with ``explain`` every line of its arithmetic."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{escape(plan.model)}[/] ({plan.architecture}) on {plan.server} {plan.server_version}: "
        f"TP {plan.tp}, DP {plan.dp}, PP {plan.pp}, {plan.ranks} ranks"
    )
    console.print(_table(plan, notes=console.width >= _WIDE))
    if explain:
        console.print("[bold]Arithmetic[/]")
        for step in plan.steps:
            console.print(f"  {step.label} = {_value(step)}  [dim]\\[{step.how}] {escape(step.note)}[/]")
    for item in plan.warnings:
        console.print(f"[yellow]warning[/] {escape(item.message)} \\[{item.code}]")
        console.print(f"  try: {escape(item.fix)}")
    for item in plan.problems:
        console.print(f"[red]refused[/] {escape(item.message)} \\[{item.code}]")
        console.print(f"  fix: {escape(item.fix)}")
    if plan.fits:
        console.print("[green]fits[/]; the command:")
    else:
        console.print("[red]does not fit[/]; the command that was planned:")
    console.print("  " + escape(shlex.join(plan.command)))


def _table(plan: Plan, *, notes: bool) -> Table:
    steps = {step.key: step for step in plan.steps}
    device, host, ranks = plan.device, plan.host, plan.ranks
    table = Table(show_edge=False, pad_edge=False)
    for name, justify in (("", "left"), ("per rank", "right"), ("in total", "right"), ("how", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")

    def row(label: str, per_rank: str, total: str, key: str) -> None:
        step = steps.get(key)
        how = "" if step is None else f"{step.how}: {step.note}" if notes else str(step.how)
        table.add_row(label, per_rank, total, escape(how))

    row("weights", _size(plan.weights_per_rank_bytes), _size(plan.weights_bytes), "weights_per_rank_bytes")
    kv_key = "kv_bytes_per_token_per_rank"
    row("KV a token", f"{plan.kv_bytes_per_token_per_rank:,} B", f"{plan.kv_bytes_per_token:,} B (one copy)", kv_key)
    if plan.state_bytes_per_request_per_rank:
        state = _size(plan.state_bytes_per_request_per_rank)
        row("state a request", state, "", "state_bytes_per_request_per_rank")
    if device.static_bytes is not None:
        row("static share", _size(device.static_bytes), f"{device.static_fraction:.3f}", "device.static_fraction")
        row("device reserve", _size(device.reserve_bytes), "", "device.reserve_bytes")
    if device.kv_tokens is not None:
        row("device KV pool", _size(device.kv_bytes), "", "device.kv_bytes")
        distinct = f"{device.distinct_tokens:,} distinct" if device.distinct_tokens is not None else ""
        row("device KV tokens", f"{device.kv_tokens:,}", distinct, "device.kv_tokens")
    if device.left_bytes is not None:
        row("left on the device", _size(device.left_bytes), "", "device.left_bytes")
    row("host available", "", _size(host.available_bytes), "host.available_bytes")
    row("host reserve", "", _size(host.reserve_bytes), "host.reserve_bytes")
    if host.total_bytes:
        key = "host.per_rank_bytes" if "host.per_rank_bytes" in steps else "host.total_bytes"
        row("host pool", _size(host.per_rank_bytes), _size(host.total_bytes), key)
        row("host tokens", f"{host.per_rank_tokens:,}", f"{host.distinct_tokens:,} distinct", "host.distinct_tokens")
        row("left on the host", "", _size(host.left_bytes), "host.left_bytes")
    largest = host.largest_safe_per_rank_bytes
    key = "host.largest_safe_per_rank_bytes"
    row(
        "largest safe host pool",
        _size(largest),
        _size(largest * ranks),
        key if key in steps else "host.largest_safe_bytes",
    )
    if plan.full_length_requests is not None:
        label = f"requests of {plan.context_length:,} tokens"
        row(label, "", f"{plan.full_length_requests:.2f} at once", "full_length_requests")
    return table


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_size(count)


def _value(step: Quantity) -> str:
    if step.value is None:
        return "unknown"
    if step.unit == "bytes":
        return f"{step.value:,.0f} B ({format_size(step.value)}, {format_binary(step.value)})"
    if step.unit in ("tokens", "count"):
        return f"{step.value:,.0f} {step.unit}"
    return f"{step.value:.4g}" + ("" if step.unit in ("fraction", "ratio") else f" {step.unit}")


def show_log(report: LogReport) -> None:
    """Print what a log says beside what its numbers should be."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(report.source)}[/]: {report.server}, model {escape(report.model or 'unknown')}")
    table = Table(show_edge=False, pad_edge=False)
    for name in ("pool", "bytes", "reported tokens", "predicted tokens", "difference"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for pool in report.pools:
        predicted = "unknown" if pool.predicted_tokens is None else f"{pool.predicted_tokens:,}"
        off = "" if pool.difference is None else f"{pool.difference:+.2%}"
        table.add_row(pool.name, format_size(pool.size_bytes), f"{pool.tokens:,}", predicted, off)
    console.print(table)
    if report.kv_bytes_per_token_per_rank is not None:
        console.print(f"KV a token per rank: {report.kv_bytes_per_token_per_rank:,} B")
    for item in report.differences:
        console.print(f"[yellow]{escape(item.what)}[/]: {escape(item.explanation)}")
