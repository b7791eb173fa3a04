"""``forebay machine``: what this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from forebay.cli._tables import print_table
from forebay.sizes import format_size

if TYPE_CHECKING:
    from forebay.machine.facts import MachineFacts

__all__ = ["command"]


@click.command("machine", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the file that `forebay plan --machine FILE` reads.")
def command(as_json: bool) -> None:
    """What this machine has, as a table or a JSON file for `plan --machine`."""
    from forebay.machine.facts import read_facts, to_json
    from forebay.machine.local import LocalMachine

    facts = read_facts(LocalMachine())
    if as_json:
        click.echo(to_json(facts))
        return
    print_table(("", "", ""), _rows(facts), right=(1,))


def _rows(facts: MachineFacts) -> list[tuple[str, str, str]]:
    """(name, size, detail) of everything a plan takes into account."""
    memory = facts.memory
    available = f"{format_size(memory.mem_available_bytes)} available (MemAvailable)"
    usable = "the smaller of MemAvailable and what the control group has left"
    rows = [
        ("memory", format_size(memory.total_bytes), available),
        ("can be used", format_size(memory.available_bytes), usable),
        ("swap", format_size(memory.swap_total_bytes), f"{format_size(memory.swap_free_bytes)} free"),
    ]
    if memory.cgroup:
        group = memory.cgroup
        used = f"{format_size(group.usage_bytes)} used, {format_size(group.reclaimable_bytes)} of it page cache"
        rows.append((f"cgroup v{group.version}", format_size(group.limit_bytes), f"{used} ({group.path})"))
    if memory.shm:
        rows.append(("/dev/shm", format_size(memory.shm.total_bytes), f"{format_size(memory.shm.free_bytes)} free"))
    locked = "no limit" if memory.memlock_bytes is None else format_size(memory.memlock_bytes)
    rows.append(("locked memory", locked, "can be pinned without privileges"))
    for node in memory.numa_nodes:
        rows.append((f"NUMA node {node.index}", format_size(node.total_bytes), f"{format_size(node.free_bytes)} free"))
    for gpu in facts.gpus:
        detail = gpu.problem or f"{format_size(gpu.free_bytes)} free, {gpu.name}"
        rows.append((f"GPU {gpu.index}", format_size(gpu.total_bytes), detail))
    if not facts.gpus:
        rows.append(("GPUs", "none", "NVML lists none"))
    return rows
