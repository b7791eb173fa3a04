"""GPUs through the ``nvidia-smi`` program, where NVML's Python package is not at hand."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from forebay.machine.interface import CommandResult, GpuReading

__all__ = ["GPU_QUERY", "PROCESS_QUERY", "parse_gpus"]

_MIB = 1 << 20
_FORMAT = "--format=csv,noheader,nounits"
GPU_QUERY = (
    "nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free,compute_cap,driver_version", _FORMAT,
)  # fmt: skip
PROCESS_QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", _FORMAT)


def parse_gpus(gpus: CommandResult, processes: CommandResult) -> list[GpuReading]:
    """The GPUs in the output of the two queries; one that cannot be read is listed with its ``problem``."""
    holders: dict[str, dict[int, int]] = {}
    for fields in _rows(processes.stdout, 3):
        if fields[1].isdecimal():
            used = int(fields[2]) * _MIB if fields[2].isdecimal() else 0
            holders.setdefault(fields[0], {})[int(fields[1])] = used
    found = []
    for fields in _rows(gpus.stdout, 7):
        index, uuid, name, total, free, capability, driver = fields
        if not index.isdecimal():
            continue
        problem = None if total.isdecimal() and free.isdecimal() else f"nvidia-smi shows its memory as {total!r}"
        found.append(
            GpuReading(
                int(index), uuid, name, 0 if problem else int(total) * _MIB, 0 if problem else int(free) * _MIB,
                holders.get(uuid, {}), capability or None, driver or None, problem,
            )
        )  # fmt: skip
    return found


def _rows(text: str, width: int) -> Iterator[list[str]]:
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == width:
            yield [cell.strip() for cell in row]
