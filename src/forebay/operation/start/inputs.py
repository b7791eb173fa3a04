"""Read and complete what ``up`` is given: a saved plan, a model folder, a run name, a port, a default host cache."""

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

__all__ = ["default_host_cache", "first_free_port", "free_run_name", "local_model", "pool_size_variables", "saved_plan"]

_DEFAULT_HOST_CACHE_BYTES = 10**9
_MAX_NAMES = 1000


def saved_plan(model: str, text: str | None = None) -> Mapping[str, Any] | None:
    """The plan in ``model`` when it is a JSON file, or in ``text`` where its content came along; else None.

    Raises:
        UsageError: a JSON file that is not a plan.
    """
    if text is None and (not model.endswith(".json") or not Path(model).is_file()):
        return None
    try:
        plan = json.loads(text if text is not None else Path(model).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{model} is not JSON: {error}") from error
    if not isinstance(plan, dict) or not _is_command(plan.get("command")) or not isinstance(plan.get("server"), str):
        raise UsageError(
            f"{model} is not a plan: it has no server and command", fix="make one with `forebay plan MODEL --json`"
        )
    return plan


def _is_command(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


def local_model(model: str, server: str) -> str:
    """``model`` as a folder that SGLang and vLLM can load; the embedded server reads more forms itself.

    ``smollm2`` and a .gguf file are converted once, by the engine's converter in a process of its own.

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


def pool_size_variables() -> dict[str, str]:
    """The environment variables that size a server's pools; the plan takes them into account."""
    names = ("VLLM_CPU_KVCACHE_SPACE", "LMCACHE_MAX_LOCAL_CPU_SIZE")
    return {name: os.environ[name] for name in names if name in os.environ}


def free_run_name(machine: Machine, model: str, server: str) -> str:
    """``MODEL-SERVER``, or ``MODEL-SERVER-2`` and so on while runs of that name are still up."""
    stem = _run_name(model, server)
    for name in (stem, *(f"{stem}-{number}" for number in range(2, _MAX_NAMES))):
        run = Run(runs_dir() / name)
        if not (run.folder / "run.json").is_file():
            return name
        record = run.read()
        if record.ended and not owned_processes(machine, record):
            return name
    raise RefusedError(f"{_MAX_NAMES} runs called {stem} are still there", fix="end some with `forebay down NAME`")


def first_free_port(machine: Machine, host: str, first: int, last: int) -> int:
    """The first free port from ``first`` to ``last``.

    Raises:
        RefusedError: none is free; the message says who holds the first.
    """
    for port in range(first, last + 1):
        if not any(finding.refuses for finding in port_findings(machine, host, port)):
            return port
    held = port_findings(machine, host, first)[0]
    raise RefusedError(
        f"ports {first} to {last} are all in use here; {held.text}",
        fix=f"another range: --port {last + 1}-{last + 10}",
        code=held.code,
    )  # fmt: skip


def default_host_cache(machine: Machine) -> int:
    """Bytes of a small default host tier: a quarter of what memory and /dev/shm have free, at most 1 GB."""
    memory = read_memory(machine)
    rooms = [memory.available_bytes, *([memory.shm.free_bytes] if memory.shm else [])]
    return min(_DEFAULT_HOST_CACHE_BYTES, *(room // 4 for room in rooms))


def _run_name(model: str, server: str) -> str:
    stem = Path(model).name.removesuffix(".json").removesuffix(".gguf")
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in stem).strip("-._")
    return f"{(kept or 'run').lower()[:40]}-{server}"
