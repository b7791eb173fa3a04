"""GPUs: what a machine has, what is free on each, and who holds the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence

from forebay.errors import UsageError
from forebay.machine.interface import GpuReading
from forebay.sizes import parse_size

__all__ = ["check_gpus", "given_gpus", "holders"]


def given_gpus(text: str) -> list[GpuReading]:
    """GPUs as the user describes them: ``8x80GB``, or ``80GB`` for one; all of it free.

    Raises:
        UsageError: it cannot be read.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX×]\s*)?(.+)", text)
    if match is None or (match[1] is not None and int(match[1]) == 0):
        raise UsageError(
            f"--gpus: {text!r} is not a number of GPUs", fix="write 8x80GB: how many, and the memory of each"
        )
    size = parse_size(match[2], what="--gpus")
    return [GpuReading(index, "", "given", size, size) for index in range(int(match[1] or 1))]


def check_gpus(gpus: Sequence[GpuReading]) -> None:
    """Refuse to plan on a GPU whose memory cannot be read.

    Raises:
        UsageError: a GPU is listed by the driver and does not answer.
    """
    for gpu in gpus:
        if gpu.problem:
            raise UsageError(
                f"GPU {gpu.index} is listed by the driver but does not answer: {gpu.problem}",
                fix="leave it out with CUDA_VISIBLE_DEVICES, or reset it; "
                "`dmesg` shows an Xid line when it fell off the bus",
            )


def holders(gpu: GpuReading) -> str:
    """Who holds a GPU's memory, for a message; pids that this machine cannot see belong to other containers."""
    if not gpu.processes:
        return "by processes the driver does not list (another container, or a display)"
    return ", ".join(f"pid {pid} ({size / 1e9:.1f} GB)" for pid, size in sorted(gpu.processes.items()))
