"""The device side that SGLang and vLLM share: which GPUs, what is free on them, how many requests fit at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.causes import Cause
from forebay.machine.accelerators import check_gpus, holders
from forebay.model.geometry import ModelGeometry
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.plan import Provenance
from forebay.planning.request import PlanRequest
from forebay.sizes import format_size

__all__ = ["GpuMemoryBudget", "check_context_length", "check_heads", "gpu_memory_budget", "record_concurrency"]

_BALANCE = 0.9


@dataclass(frozen=True, slots=True)
class GpuMemoryBudget:
    """The GPU with the least free memory decides for all ranks."""

    total_bytes: int
    free_bytes: int


def gpu_memory_budget(sheet: PlanBuilder, request: PlanRequest, ranks_per_host: int) -> GpuMemoryBudget | None:
    """What a rank has on its GPU; None where no GPU is known, with a warning.

    Raises:
        UsageError: a GPU does not answer.
    """
    gpus = request.gpus
    if not gpus:
        sheet.warn(
            Cause.UNKNOWN,
            "no GPU is known: weights and device pool are not checked",
            "give them: --gpus 8x80GB, or --machine FILE from that machine",
        )
        return None
    check_gpus(gpus)
    if len(gpus) < ranks_per_host:
        sheet.refuse(
            Cause.GPU_TOO_SMALL,
            f"{ranks_per_host} ranks on this host need as many GPUs, there are {len(gpus)}",
            f"--tp {len(gpus)}, or more GPUs",
        )
    used = sorted(gpus, key=lambda gpu: -gpu.free_bytes)[:ranks_per_host]
    least = min(used, key=lambda gpu: gpu.free_bytes)
    if least.free_bytes < _BALANCE * least.total_bytes:
        sheet.warn(
            Cause.GPU_BUSY,
            f"GPU {least.index} has {format_size(least.free_bytes)} free of {format_size(least.total_bytes)}: the rest "
            "is "
            f"held {holders(least) if not least.processes else 'by ' + holders(least)}",
            "end what holds it, or plan for what is left",
        )
    if least.free_bytes < _BALANCE * used[0].free_bytes and len(used) > 1:
        sheet.warn(
            Cause.GPU_UNBALANCED,
            f"free memory differs between GPUs: {format_size(least.free_bytes)} on GPU {least.index}, "
            f"{format_size(used[0].free_bytes)} on GPU {used[0].index}: the least decides for all ranks",
            "free the fuller GPU; SGLang refuses to start below 90 %",
        )
    how = Provenance.GIVEN if least.name == "given" else Provenance.MEASURED
    sheet.put("device.total_bytes", "GPU memory", least.total_bytes, "bytes", how, f"the fullest of {len(used)} GPUs")
    sheet.put("device.free_bytes", "GPU free", least.free_bytes, "bytes", how, "before anything is loaded")
    return GpuMemoryBudget(least.total_bytes, least.free_bytes)


def check_heads(sheet: PlanBuilder, geometry: ModelGeometry, tp: int, what: str = "--tp") -> bool:
    """Whether the heads divide over ``tp`` ranks; writes the refusal where not."""
    works = [n for n in range(1, geometry.num_heads + 1) if _divides(geometry, n)]
    if _divides(geometry, tp):
        return True
    near = min(works, key=lambda n: (abs(n - tp), n))
    sheet.refuse(
        Cause.TP_NOT_DIVISIBLE,
        f"{geometry.num_heads} attention heads and {geometry.num_kv_heads} KV heads cannot be divided over {tp} ranks",
        f"{what} {near} (these work: {', '.join(map(str, works))})",
    )
    return False


def _divides(geometry: ModelGeometry, tp: int) -> bool:
    if tp < 1 or geometry.num_heads % tp:
        return False
    kv_heads = geometry.num_kv_heads
    return geometry.is_latent or kv_heads % tp == 0 or tp % kv_heads == 0


def check_context_length(sheet: PlanBuilder, geometry: ModelGeometry, context: int | None) -> None:
    """Refuse a context beyond the model's positions."""
    if context is not None and geometry.max_context and context > geometry.max_context:
        sheet.refuse(
            Cause.CTX_TOO_LONG_FOR_MODEL,
            f"a context of {context:,} tokens is beyond the model's {geometry.max_context:,} positions",
            f"--context {geometry.max_context}",
        )


def record_concurrency(
    sheet: PlanBuilder,
    request: PlanRequest,
    tokens: int | None,
    context: int,
    *,
    must_fit: bool,
    replicas: int = 1,
    limit: float = math.inf,
) -> float | None:
    """Write down how many requests of full length fit at once, and refuse or warn where not even one does.

    Args:
        tokens: the device pool of one replica.
        must_fit: the server dies where one request of full length does not fit.
        limit: another bound on requests of one replica (state slots, a window pool).
    """
    if tokens is None or not context:
        return None
    fit = min(tokens / context, limit)
    note = f"{tokens:,} tokens / {context:,}" + (f" x {replicas} replicas" if replicas > 1 else "")
    total = sheet.put(
        "full_length_requests", "full-length requests at once", fit * replicas, "requests", Provenance.FORMULA, note
    )
    if fit < 1:
        message = f"one request of {context:,} tokens needs more than the KV pool's {tokens:,}"
        fix = f"--context {max(1, tokens)}, or a larger pool"
        (sheet.refuse if must_fit or request.context is not None else sheet.warn)(
            Cause.CTX_TOO_LONG_FOR_KV, message, fix
        )
    elif request.concurrency is not None and fit * replicas < request.concurrency:
        sheet.warn(
            Cause.CTX_TOO_LONG_FOR_KV,
            f"{request.concurrency} requests of {context:,} tokens do not fit at once: {fit * replicas:.1f} do",
            f"--context {tokens * replicas // request.concurrency}, or --concurrency {int(fit * replicas)}",
        )
    return total
