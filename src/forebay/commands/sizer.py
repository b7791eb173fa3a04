"""The planner as ``doctor`` calls it: which size of a failed launch would fit. Operation does not import planning."""

from __future__ import annotations

from forebay.errors import UsageError
from forebay.machine.local import LocalMachine
from forebay.operation.doctor.launch_sizing import LaunchToSize, SizedLaunch
from forebay.planning.make_plan import PlanOptions, make_plan
from forebay.sizes import GB

__all__ = ["size_launch"]

_SHARED = ("tp_size", "pp_size", "dp_size", "kv_cache_dtype", "quantization")
_PASSED = {
    "sglang": (
        *_SHARED,
        "mem_fraction_static",
        "context_length",
        "hicache_ratio",
        "hicache_size",
        "page_size",
        "max_running_requests",
    ),
    "vllm": (*_SHARED, "gpu_memory_utilization", "max_model_len", "kv_offloading_size", "max_num_seqs"),
}
"""The flags of a launch that sizes depend on."""
_OWN_NAME = {
    "vllm": {
        "tp_size": "tensor_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "dp_size": "data_parallel_size",
    }
}


def size_launch(launch: LaunchToSize) -> SizedLaunch | None:
    """One sentence with the values that fit, computed by the planner; None where it cannot plan this launch."""
    machine = launch.machine
    gpus = f"{len(machine.gpu_bytes)}x{machine.gpu_bytes[0] / GB:g}GB" if machine.gpu_bytes else None
    options = PlanOptions(
        launch.model,
        launch.server,
        launch.version,
        gpus=gpus,
        host_memory_bytes=machine.host_available_bytes or machine.host_memory_bytes,
        server_flags=_flags(launch),
    )
    try:
        plan = make_plan(options, LocalMachine())
    except UsageError:
        return None
    if plan.fits:
        return SizedLaunch(True, "by `forebay plan` this launch fits this machine: something else held the memory")
    return SizedLaunch(False, "; ".join(f"{problem.message}: {problem.fix}" for problem in plan.problems[:2]))


def _flags(launch: LaunchToSize) -> tuple[str, ...]:
    flags: list[str] = []
    names = _OWN_NAME.get(launch.server, {})
    for name in _PASSED[launch.server]:
        value = launch.settings.get(name)
        if value and value not in ("None", "auto", "0"):
            flags += ["--" + names.get(name, name).replace("_", "-"), value]
    if launch.settings.get("enable_hierarchical_cache") in ("True", "true"):
        flags.append("--enable-hierarchical-cache")
    return tuple(flags)
