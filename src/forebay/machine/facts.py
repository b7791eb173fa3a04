"""What ``forebay plan`` needs of a machine, as one value: read here, or from a file made on another machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import UsageError
from forebay.machine.interface import GpuReading, Machine
from forebay.machine.memory import HostMemory, read_memory

__all__ = ["SCHEMA", "MachineFacts", "load_facts", "read_facts", "to_json"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine at one moment; the JSON of ``forebay machine --json`` has the same fields."""

    schema: int
    name: str
    taken_at_s: float
    cpus: int
    memory: HostMemory
    gpus: tuple[GpuReading, ...]


def read_facts(machine: Machine) -> MachineFacts:
    """Look at ``machine`` now.

    Raises:
        UsageError: it shows no /proc/meminfo.
    """
    try:
        memory = read_memory(machine)
    except OSError as error:
        raise UsageError(
            f"the memory of machine {machine.name!r} cannot be read: {error}",
            fix="give it: --host-memory 64GB, or --machine FILE made by `forebay machine --json` there",
        ) from error
    return MachineFacts(SCHEMA, machine.name, machine.now(), _cpus(machine), memory, tuple(machine.gpus()))


def load_facts(path: Path) -> MachineFacts:
    """Read a file that ``forebay machine --json`` wrote.

    Raises:
        UsageError: it is not there, not such a file, or of another schema.
    """
    try:
        facts = msgspec.json.decode(path.read_bytes(), type=MachineFacts)
    except FileNotFoundError as error:
        raise UsageError(
            f"--machine: {path}: no such file", fix=f"make it there: forebay machine --json > {path}"
        ) from error
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"--machine: {path} is no machine file: {error}", fix="make it with: forebay machine --json"
        ) from error
    if facts.schema != SCHEMA:
        raise UsageError(
            f"--machine: {path} has schema {facts.schema}, this forebay reads {SCHEMA}", fix="make it again"
        )
    return facts


def to_json(facts: MachineFacts) -> str:
    """The file's text, indented."""
    return msgspec.json.format(msgspec.json.encode(facts), indent=2).decode()


def _cpus(machine: Machine) -> int:
    try:
        return sum(line.startswith("processor") for line in machine.read("/proc/cpuinfo").splitlines())
    except OSError:
        return 0
