"""From what a user says to a plan: read the machine, read the server's flags with that server's meaning, plan.

``make_plan`` is what ``forebay plan`` and ``forebay up`` call; it is pure but for the looks at the machine and the
model's headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.causes import Cause
from forebay.errors import UsageError
from forebay.machine.accelerators import given_gpus
from forebay.machine.facts import MachineFacts, load_facts, read_facts
from forebay.machine.interface import Machine
from forebay.model.source import resolve
from forebay.planning.arithmetic.flag_parser import Flag, parse_flags
from forebay.planning.arithmetic.version_rules import NEWEST
from forebay.planning.embedded import plan as embedded_plan
from forebay.planning.plan import Plan, Provenance
from forebay.planning.request import HostMemoryBudget, PlanRequest
from forebay.planning.sglang import flags as sglang_flags
from forebay.planning.vllm import flags as vllm_flags

__all__ = ["PlanOptions", "make_plan"]

_TABLES: Mapping[str, tuple[Flag, ...]] = {
    "embedded": embedded_plan.FLAGS,
    "sglang": sglang_flags.FLAGS,
    "vllm": vllm_flags.FLAGS,
}
# our option -> the server's setting of the same meaning
_SAME: Mapping[str, Mapping[str, str]] = {
    "embedded": {
        "tp": "tp",
        "dtype": "dtype",
        "context": "context_length",
        "host_cache_bytes": "host_cache",
        "device_cache_bytes": "device_cache",
    },
    "sglang": {
        "tp": "tp_size",
        "dp": "dp_size",
        "pp": "pp_size",
        "dtype": "dtype",
        "kv_dtype": "kv_cache_dtype",
        "context": "context_length",
    },
    "vllm": {
        "tp": "tensor_parallel_size",
        "dp": "data_parallel_size",
        "pp": "pipeline_parallel_size",
        "dtype": "dtype",
        "kv_dtype": "kv_cache_dtype",
        "context": "max_model_len",
    },
}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user said; None: nothing. Sizes are bytes, and in total over the ranks."""

    model: str
    server: str = "embedded"
    version: str | None = None
    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    context: int | None = None
    concurrency: int | None = None
    host_cache_bytes: int | None = None
    device_cache_bytes: int | None = None
    weights_bytes: int | None = None
    host_memory_bytes: int | None = None
    host_reserve_bytes: int | None = None
    gpus: str | None = None
    machine_file: Path | None = None
    server_flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def make_plan(options: PlanOptions, machine: Machine) -> Plan:
    """Plan what ``options`` say, on ``machine`` where they say nothing of the machine.

    Raises:
        UsageError: a model, a size, a flag or a machine that cannot be read.
    """
    parsed = parse_flags(options.server_flags, _TABLES[options.server], options.server)
    said = _merged(options, parsed.values)
    facts = _facts(options, machine)
    flags = {dest: value for dest, value in parsed.values.items() if dest not in _SAME[options.server].values()}
    request = PlanRequest(
        model=resolve(options.model),
        server=options.server,
        version=options.version or NEWEST[options.server],
        host=_room(options, facts),
        gpus=_gpus(options, facts),
        tp=_count(said["tp"], "--tp"),
        dp=_count(said["dp"], "--dp"),
        pp=_count(said["pp"], "--pp"),
        dtype=said["dtype"],
        kv_dtype=said["kv_dtype"],
        context=said["context"],
        concurrency=options.concurrency,
        host_cache_bytes=said["host_cache_bytes"],
        device_cache_bytes=said["device_cache_bytes"],
        weights_bytes=options.weights_bytes,
        reserve_bytes=options.host_reserve_bytes,
        flags=flags,
        passthrough=parsed.passthrough,
        env=options.env,
    )
    return _planner(options.server)(request)


def _planner(server: str) -> Callable[[PlanRequest], Plan]:
    if server == "sglang":
        from forebay.planning.sglang.plan import plan_sglang

        return plan_sglang
    if server == "vllm":
        from forebay.planning.vllm.plan import plan_vllm

        return plan_vllm
    return embedded_plan.plan_embedded


def _merged(options: PlanOptions, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Our options and the server's flags of the same meaning; both and different is refused."""
    names = ("tp", "dp", "pp", "dtype", "kv_dtype", "context", "host_cache_bytes", "device_cache_bytes")
    merged: dict[str, Any] = {}
    for name in names:
        ours, theirs = getattr(options, name), flags.get(_SAME[options.server].get(name, ""))
        if ours is not None and theirs is not None and ours != theirs:
            option = name.removesuffix("_bytes").replace("_", "-")
            raise UsageError(
                f"--{option} says {ours}, the server's own flag says {theirs}",
                fix="give one of the two",
                code=Cause.FLAG_CONFLICT,
            )
        merged[name] = ours if ours is not None else theirs
    return merged


def _count(value: int | None, option: str) -> int:
    if value is not None and value < 1:
        raise UsageError(f"{option} {value}: at least 1 is needed")
    return value or 1


def _facts(options: PlanOptions, machine: Machine) -> MachineFacts | None:
    """The machine, where anything about it is still open."""
    if options.machine_file is not None:
        return load_facts(options.machine_file)
    return read_facts(machine) if options.host_memory_bytes is None else None


def _room(options: PlanOptions, facts: MachineFacts | None) -> HostMemoryBudget:
    if options.host_memory_bytes is not None:
        shm = facts.memory.shm.free_bytes if facts and facts.memory.shm else None
        return HostMemoryBudget(options.host_memory_bytes, Provenance.GIVEN, "--host-memory", shm_free_bytes=shm)
    assert facts is not None
    memory = facts.memory
    where = "MemAvailable"
    if memory.cgroup and memory.cgroup.available_bytes < memory.mem_available_bytes:
        where = f"control group {memory.cgroup.path}: limit - usage + page cache"
    return HostMemoryBudget(
        available_bytes=memory.available_bytes,
        how=Provenance.MEASURED,
        note=where if options.machine_file is None else f"{where}, from {options.machine_file}",
        mem_available_bytes=memory.mem_available_bytes,
        cgroup_available_bytes=memory.cgroup.available_bytes if memory.cgroup else None,
        shm_free_bytes=memory.shm.free_bytes if memory.shm else None,
        memlock_bytes=memory.memlock_bytes,
    )


def _gpus(options: PlanOptions, facts: MachineFacts | None) -> tuple[Any, ...] | None:
    if options.gpus is not None:
        return tuple(given_gpus(options.gpus))
    return facts.gpus if facts is not None and facts.gpus else None
