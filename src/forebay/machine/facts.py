"""What ``forebay plan`` needs of a machine, as one value: read here, or from a file made on another machine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import UsageError
from forebay.hostmemory.cgroups import cgroup_folders
from forebay.json_records import decode_record, encode_record
from forebay.machine.container import CONTAINER_FILES, ContainerFacts, device_problems, has_ipc_lock, read_container
from forebay.machine.interface import GpuReading, Machine
from forebay.machine.memory import HostMemory, read_memory
from forebay.machine.nvidia_smi import GPU_QUERY, PROCESS_QUERY

__all__ = ["SCHEMA", "MachineFacts", "load_facts", "read_facts", "to_json"]

SCHEMA = 1

_FILES = ("/proc/meminfo", "/proc/cpuinfo", "/proc/self/cgroup", "/proc/self/limits")
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    2: ("memory.max", "memory.high", "memory.current", "memory.stat"),
}


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine at one moment; the JSON of ``forebay machine --json`` has the same fields."""

    schema: int
    name: str
    taken_at_s: float
    cpus: int
    memory: HostMemory
    gpus: tuple[GpuReading, ...]
    container: ContainerFacts | None = None
    ipc_lock: bool = False
    """CAP_IPC_LOCK: the limit on locked memory does not apply."""
    device_problems: tuple[str, ...] = ()
    """GPU device nodes that are missing or may not be opened."""


def read_facts(machine: Machine) -> MachineFacts:
    """Read ``machine`` now, in two batches.

    Raises:
        UsageError: it has no /proc/meminfo.
    """
    with machine.batch(
        read=(*_FILES, *CONTAINER_FILES), globs=("/sys/devices/system/node/node*/meminfo",),
        folders=("/sys/devices/system/node",), spaces=("/dev/shm",), commands=(GPU_QUERY, PROCESS_QUERY), clock=True,
    ):  # fmt: skip
        groups = [
            f"{folder}/{name}" for version, folder in cgroup_folders(machine.read) for name in _GROUP_FILES[version]
        ]
        with machine.batch(read=groups) if groups else nullcontext():
            return _facts(machine)


def _facts(machine: Machine) -> MachineFacts:
    try:
        memory = read_memory(machine)
    except OSError as error:
        raise UsageError(
            f"the memory of machine {machine.name!r} cannot be read: {error}",
            fix="give it: --host-memory 64GB, or --machine FILE made by `forebay machine --json` there",
        ) from error
    gpus, container = tuple(machine.gpus()), read_container(machine)
    return MachineFacts(
        SCHEMA, machine.name, machine.now(), _cpus(machine), memory, gpus, container, has_ipc_lock(machine),
        tuple(device_problems(machine)),
    )  # fmt: skip


def load_facts(path: Path) -> MachineFacts:
    """Read a file that ``forebay machine --json`` wrote.

    Raises:
        UsageError: it is not there, not such a file, or of another schema.
    """
    try:
        facts = decode_record(MachineFacts, json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        raise UsageError(
            f"--machine: {path}: no such file", fix=f"make it there: forebay machine --json > {path}"
        ) from error
    except (OSError, ValueError) as error:
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
    return encode_record(facts).decode()


def _cpus(machine: Machine) -> int:
    try:
        return sum(line.startswith("processor") for line in machine.read("/proc/cpuinfo").splitlines())
    except OSError:
        return 0
