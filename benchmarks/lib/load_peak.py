"""How much memory loading one rank's weights takes at its worst, measured in a process of its own.

Run as a program: ``load_peak.py FOLDER RANK TP`` prints one JSON object. It does what the worker does, in its order:
config, kernels, then the weights; the peak is the kernel's (VmHWM), reset just before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.lib.modules import module_command, module_env

__all__ = ["measure"]


def measure(folder: Path, rank: int, tp: int) -> dict[str, int]:
    """``weights_bytes``: packed, as the server reports them; ``peak_bytes``: of memory,
    above the process without weights;
    ``tensor_bytes``: the largest tensor of the checkpoint."""
    command = module_command("lib.load_peak", str(folder), str(rank), str(tp))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=module_env())
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _load(folder: Path, rank: int, tp: int) -> dict[str, int]:
    import torch

    from forebay.engine.checkpoint.checkpoint import Checkpoint
    from forebay.engine.distributed.collectives import SharedMemoryComm, shared_buffer
    from forebay.engine.kernels import load_backend
    from forebay.engine.model_executor.load_model import inspect, load

    torch.set_num_threads(1)
    found = inspect(folder, tp=tp)
    backend = load_backend(threads=1)
    comm = SharedMemoryComm(rank, tp, shared_buffer(tp)) if tp > 1 else None
    backend.pack_linear(torch.zeros(32, 32, dtype=torch.bfloat16))  # the library's code is resident now
    largest = max(entry.nbytes for entry in Checkpoint.open(folder).entries.values())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (proc(5))
    before = _status_bytes("VmRSS")
    loaded = load(found, backend, comm=comm)
    peak, after = _status_bytes("VmHWM") - before, _status_bytes("VmRSS") - before
    return {"weights_bytes": loaded.weight_bytes, "peak_bytes": peak, "kept_bytes": after, "tensor_bytes": largest}


if __name__ == "__main__":
    print(json.dumps(_load(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), flush=True)
    os._exit(0)
