"""``forebay machine``: what this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from forebay.cli._hosts import destinations, each_host, on_option
from forebay.cli._tables import print_table
from forebay.errors import ForebayError, UsageError
from forebay.sizes import format_size

if TYPE_CHECKING:
    from forebay.machine.container import ContainerFacts
    from forebay.machine.facts import MachineFacts
    from forebay.remote.destination import Destination

__all__ = ["command"]


@click.command("machine", context_settings={"help_option_names": ["-h", "--help"]})
@on_option
@click.option("--json", "as_json", is_flag=True, help="Print the file that `forebay plan --machine FILE` reads.")
def command(on: tuple[str, ...], as_json: bool) -> int:
    """What this machine has, or others have, as a table or a JSON file for `plan --machine`.

    \b
    forebay machine --on gpu1
    forebay machine --on root@pve,lxc:101 --json > machine.json

    Another machine needs a POSIX shell and coreutils, nothing else.
    """
    from forebay.machine.facts import read_facts, to_json
    from forebay.machine.local import LocalMachine

    hosts = destinations(on)
    if not hosts:
        facts = read_facts(LocalMachine())
        click.echo(to_json(facts)) if as_json else print_table(("", "", ""), _rows(facts), right=(1,))
        return 0
    if as_json and len(hosts) > 1:
        raise UsageError("--json is the file of one machine", fix=f"--on {hosts[0].name}")
    code = 0
    for name, result in each_host(hosts, _facts_of):
        if isinstance(result, ForebayError):
            click.echo(f"forebay: {result.message}" + (f"\n  fix: {result.fix}" if result.fix else ""), err=True)
            code = int(result.exit_code)
        elif as_json:
            click.echo(to_json(result))
        else:
            if len(hosts) > 1:
                click.echo(f"{name}:")
            print_table(("", "", ""), _rows(result), right=(1,))
    return code


def _facts_of(host: Destination) -> MachineFacts:
    from forebay.machine.facts import read_facts
    from forebay.remote.remote_machine import connect

    with connect(host) as machine:
        return read_facts(machine)


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
    pinned = "no limit applies (CAP_IPC_LOCK)" if facts.ipc_lock else "can be pinned without privileges"
    rows.append(("locked memory", locked, pinned))
    for node in memory.numa_nodes:
        rows.append((f"NUMA node {node.index}", format_size(node.total_bytes), f"{format_size(node.free_bytes)} free"))
    for gpu in facts.gpus:
        detail = gpu.problem or f"{format_size(gpu.free_bytes)} free, {gpu.name}"
        rows.append((f"GPU {gpu.index}", format_size(gpu.total_bytes), detail))
    if not facts.gpus:
        rows.append(("GPUs", "none", "neither NVML nor nvidia-smi lists one"))
    rows += [("", "", f"note: {problem}") for problem in facts.device_problems]
    if facts.container is not None:
        rows.append(("container", facts.container.kind, _container_text(facts.container)))
    return rows


def _container_text(container: ContainerFacts) -> str:
    memory = "memory above is the container's (lxcfs)" if container.lxcfs else "/proc/meminfo shows its host's memory"
    root = ", root is an ordinary user of the host" if container.unprivileged else ""
    init = "" if container.reaps else f"; pid 1 ({container.init}) may not reap orphans"
    return f"{memory}{root}{init}"
