"""What ``up`` makes of what it is given: a saved plan, a model another server can load, a name, a port, a modest cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import RefusedError, UsageError
from forebay.machine.interface import Machine
from forebay.machine.memory import read_memory
from forebay.operation.start.preflight import port_findings
from forebay.paths import runs_dir
from forebay.runs.owned_processes import owned_processes
from forebay.runs.run_record import Run

__all__ = ["first_free_port", "free_run_name", "local_model", "modest_host_cache", "pool_variables", "saved_plan"]

_MODEST_BYTES = 10**9
_MOST_NAMES = 1000


def saved_plan(model: str) -> Mapping[str, Any] | None:
    """The plan in ``model`` when it is a JSON file, else None.

    Raises:
        UsageError: a JSON file that is no plan.
    """
    if not model.endswith(".json") or not Path(model).is_file():
        return None
    try:
        plan = json.loads(Path(model).read_bytes())
    except ValueError as error:
        raise UsageError(f"{model} is not JSON: {error}") from error
    if not isinstance(plan, dict) or not isinstance(plan.get("command"), list) or "server" not in plan:
        raise UsageError(
            f"{model} is no plan: it has no server and command", fix="make one with `forebay plan MODEL --json`"
        )
    return plan


def local_model(model: str, server: str) -> str:
    """``model`` as a folder that SGLang and vLLM can load; the embedded server resolves its own.

    A catalogue name with real weights and a .gguf file are converted once, by the engine's own converter in a process of
    its own.

    Raises:
        RefusedError: the conversion failed.
    """
    known = model == "smollm2" or model.endswith(".gguf")
    if server == "embedded" or not known:
        return model
    code = (
        "import sys; from forebay.engine.model_import.resolve import resolve_model; print(resolve_model(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RefusedError(f"{model} could not be made into a folder for {server}: {said}", fix="give a model folder")
    return done.stdout.strip().splitlines()[-1]


def pool_variables() -> dict[str, str]:
    """The variables of this environment that size a server's pools: the plan must know them."""
    names = ("VLLM_CPU_KVCACHE_SPACE", "LMCACHE_MAX_LOCAL_CPU_SIZE")
    return {name: os.environ[name] for name in names if name in os.environ}


def free_run_name(machine: Machine, model: str, server: str) -> str:
    """``MODEL-SERVER``, numbered from the second on while runs of that name are still there."""
    stem = _run_name(model, server)
    for name in (stem, *(f"{stem}-{number}" for number in range(2, _MOST_NAMES))):
        run = Run(runs_dir() / name)
        if not (run.folder / "run.json").is_file():
            return name
        record = run.read()
        if record.ended and not owned_processes(machine, record):
            return name
    raise RefusedError(f"{_MOST_NAMES} runs called {stem} are still there", fix="end some with `forebay down NAME`")


def first_free_port(machine: Machine, host: str, first: int, last: int) -> int:
    """The first port from ``first`` to ``last`` that a server can have.

    Raises:
        RefusedError: none is free; with what holds the first.
    """
    for port in range(first, last + 1):
        if not any(finding.refuses for finding in port_findings(machine, host, port)):
            return port
    held = port_findings(machine, host, first)[0]
    raise RefusedError(
        f"ports {first} to {last} are all in use here; {held.text}", fix=f"another range: --port {last + 1}-{last + 10}",
        code=held.code,
    )  # fmt: skip


def modest_host_cache(machine: Machine) -> int:
    """Bytes of a host tier that no machine misses: a quarter of what memory and /dev/shm have free, at most 1 GB."""
    memory = read_memory(machine)
    rooms = [memory.available_bytes, *([memory.shm.free_bytes] if memory.shm else [])]
    return min(_MODEST_BYTES, *(room // 4 for room in rooms))


def _run_name(model: str, server: str) -> str:
    stem = Path(model).name.removesuffix(".json").removesuffix(".gguf")
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in stem).strip("-._")
    return f"{(kept or 'run').lower()[:40]}-{server}"
