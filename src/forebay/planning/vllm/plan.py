"""A plan for vLLM: its rules in its units (0.32.0; paths under vllm/).

- Budget a GPU: ceil(total x ``gpu_memory_utilization``), refused where less is free (``v1/worker/utils.py``
``request_memory``);
  KV gets what weights, the profile run's peak and, since 0.21, the CUDA graph estimate leave
  (``v1/worker/gpu_worker.py`` ``determine_available_memory``). ``--kv-cache-memory-bytes`` replaces all of it.
- One request of ``max_model_len`` must fit, or the engine dies (``v1/core/kv_cache_utils.py``).
- ``--kv-offloading-size`` is GiB in total over the ranks (``config/cache.py``), a file in /dev/shm
  (``v1/kv_offload/cpu/shared_offload_region.py``); latent KV on one node with TP only is stored once; with the lmcache
  back end the size is ignored: the LMCache server holds the memory (``config/vllm.py``).
- LMCache in the process: ``max_local_cpu_size`` GiB a rank, 5 by default (``lmcache/v1/config.py``); latent KV is saved
by the first
  rank only (``save_only_first_rank``), and every rank still allocates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.causes import Cause
from forebay.planning.arithmetic.gpu_memory import (
    check_context_length,
    check_heads,
    gpu_memory_budget,
    record_concurrency,
)
from forebay.planning.arithmetic.host_memory import gb, replication
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.arithmetic.version_rules import rule
from forebay.planning.arithmetic.weight_memory import WeightMemory, record_weights
from forebay.planning.plan import DevicePlan, Plan, Provenance
from forebay.planning.request import PlanRequest
from forebay.planning.vllm.command import command
from forebay.planning.vllm.device_memory import Group, Pool, bytes_per_token, groups, largest_length, pool
from forebay.planning.vllm.host_memory import plan_host
from forebay.sizes import GIB

__all__ = ["plan_vllm"]

_ACTIVATIONS = 3 * GIB // 2
_NON_TORCH = GIB // 2
_GRAPHS = GIB
_GPU_BLOCK, _CPU_BLOCK = 16, 128


@dataclass(frozen=True, slots=True)
class _Shape:
    """What sizes the pool besides bytes."""

    block: int
    length: int
    in_flight: int
    on_cpu: bool


def plan_vllm(request: PlanRequest) -> Plan:
    """Plan ``request`` for vLLM."""
    sheet, flags, geometry = PlanBuilder(), request.flags, request.model.geometry
    tp, ranks = request.tp, request.tp * request.pp * request.dp
    check_heads(sheet, geometry, tp)
    check_context_length(sheet, geometry, request.context)
    on_cpu = "VLLM_CPU_KVCACHE_SPACE" in request.env or request.env.get("VLLM_TARGET_DEVICE") == "cpu"
    block = int(flags.get("block_size", _CPU_BLOCK if on_cpu else _GPU_BLOCK))
    length = request.context or geometry.max_context
    shape = _Shape(block, length, _batched_tokens(request, on_cpu), on_cpu)
    found = groups(geometry, tp, request.kv_dtype)
    per_rank = -(-bytes_per_token(found) // request.pp)
    copies = replication(geometry.num_kv_heads, geometry.is_latent, tp)
    one_copy = per_rank * tp * request.pp // copies
    _put_cell(sheet, found, per_rank, one_copy, copies, tp)
    weights = record_weights(sheet, request, tp, tp, request.pp)
    device, made = _device(sheet, request, found, weights, shape)
    tokens = made.tokens if made and made.concurrency >= 1 else None
    full_length = record_concurrency(sheet, request, tokens, length, must_fit=False, replicas=request.dp)
    host = plan_host(sheet, request, one_copy, copies, block, made)
    return Plan(
        fits=not sheet.problems,
        server="vllm",
        server_version=request.version,
        model=request.model.name,
        architecture=geometry.architecture,
        ranks=ranks,
        tp=tp,
        dp=request.dp,
        pp=request.pp,
        page_size=block,
        context_length=length,
        kv_bytes_per_token_per_rank=per_rank,
        kv_bytes_per_token=one_copy,
        kv_replicated=copies > 1,
        state_bytes_per_request_per_rank=sum(group.layers * group.token_bytes for group in found if group.is_state),
        weights_bytes=weights.total_bytes,
        weights_per_rank_bytes=weights.per_rank_bytes,
        full_length_requests=full_length,
        device=device,
        host=host,
        command=command(request),
        env=request.env,
        problems=tuple(sheet.problems),
        warnings=tuple(sheet.warnings),
        steps=tuple(sheet.steps),
    )


def _batched_tokens(request: PlanRequest, on_cpu: bool) -> int:
    """``--max-num-batched-tokens``, or the API server's default by GPU memory (``engine/arg_utils.py``)."""
    given = request.flags.get("max_num_batched_tokens")
    if given:
        return int(given)
    if on_cpu:
        return 2048 * request.tp * request.pp
    largest = max((gpu.total_bytes for gpu in request.gpus or ()), default=0)
    return 16384 if largest >= 160 * GIB else 8192 if largest >= 70 * GIB else 2048


def _put_cell(sheet: PlanBuilder, found: list[Group], per_rank: int, one_copy: int, copies: int, tp: int) -> None:
    kinds = []
    for group in found:
        kind = "state" if group.is_state else f"window {group.window}" if group.window else "every token"
        kinds.append(f"{group.layers} layers x {group.token_bytes:,} B ({kind})")
    note = " + ".join(kinds) + f", TP {tp}"
    sheet.put("kv_bytes_per_token_per_rank", "KV a token per rank", per_rank, "bytes", Provenance.FORMULA, note)
    note = "the same bytes on every rank" if copies > 1 else "each rank holds its heads"
    sheet.put(
        "kv_bytes_per_token", "KV a token, one copy", one_copy, "bytes", Provenance.FORMULA, f"{note} ({copies} copies)"
    )


def _device(
    sheet: PlanBuilder, request: PlanRequest, found: list[Group], weights: WeightMemory, shape: _Shape
) -> tuple[DevicePlan, Pool | None]:
    explicit = request.flags.get("kv_cache_memory_bytes")
    if "VLLM_CPU_KVCACHE_SPACE" in request.env:
        explicit = int(float(request.env["VLLM_CPU_KVCACHE_SPACE"]) * GIB)  # the variable wins over the flag
    room = None if shape.on_cpu else gpu_memory_budget(sheet, request, request.tp * request.pp * request.dp)
    if explicit:
        by_variable = "VLLM_CPU_KVCACHE_SPACE" in request.env
        note = "VLLM_CPU_KVCACHE_SPACE, GiB a rank" if by_variable else "--kv-cache-memory-bytes, per rank"
        sheet.put("device.kv_bytes", "device KV bytes", int(explicit), "bytes", Provenance.GIVEN, note)
        if shape.on_cpu and int(explicit) > request.host.available_bytes:
            sheet.refuse(
                Cause.HOST_POOL_TOO_BIG,
                f"a KV cache of {gb(explicit)} per rank on the CPU against {gb(request.host.available_bytes)} "
                "available",
                f"VLLM_CPU_KVCACHE_SPACE={max(1, request.host.available_bytes // GIB // 2)}"
                if by_variable
                else f"--kv-cache-memory-bytes {request.host.available_bytes // 2}",
            )
        made = _pool(sheet, request, found, int(explicit), shape)
        total, free = (room.total_bytes, room.free_bytes) if room else (None, None)
        left = free - int(explicit) - weights.per_rank_bytes if free is not None and weights.per_rank_bytes else None
        return _plan(total, free, None, None, weights, int(explicit), made, request, left), made
    if room is None or weights.per_rank_bytes is None:
        if room is not None:
            sheet.warn(Cause.UNKNOWN, "the weights' bytes are not known: device not planned", "give --weights-bytes")
        return DevicePlan(), None
    return _from_utilization(sheet, request, found, weights, shape, room.total_bytes, room.free_bytes)


def _from_utilization(
    sheet: PlanBuilder,
    request: PlanRequest,
    found: list[Group],
    weights: WeightMemory,
    shape: _Shape,
    total: int,
    free: int,
) -> tuple[DevicePlan, Pool | None]:
    given = request.flags.get("gpu_memory_utilization")
    fraction = float(given if given is not None else rule("vllm.gpu_memory_utilization", request.version))
    how = Provenance.GIVEN if given is not None else Provenance.RULE
    sheet.put("device.static_fraction", "gpu-memory-utilization", fraction, "fraction", how, "of the whole GPU")
    asked = math.ceil(total * fraction)
    sheet.put("device.static_bytes", "budget", asked, "bytes", Provenance.RULE, f"ceil({gb(total)} x {fraction:g})")
    if free < asked:
        sheet.refuse(
            Cause.GPU_BUSY,
            f"vLLM wants {gb(asked)} ({fraction:g} of the GPU), {gb(free)} are free",
            f"--gpu-memory-utilization {math.floor(free / total * 100) / 100:g}, or free the GPU",
        )
    graphs = 0 if request.flags.get("enforce_eager") else _GRAPHS
    inside = graphs if rule("vllm.graphs_inside_budget", request.version) else 0
    note = "profile run 1.5 GiB, outside torch 0.5 GiB" + (", CUDA graphs 1 GiB inside the budget" if inside else "")
    other = sheet.put(
        "device.reserve_bytes", "beside weights", _ACTIVATIONS + _NON_TORCH + inside, "bytes", Provenance.ASSUMED, note
    )
    assert weights.per_rank_bytes is not None
    kv_bytes = asked - weights.per_rank_bytes - other
    note = f"{gb(asked)} - {gb(weights.per_rank_bytes)} weights - {gb(other)}"
    sheet.put("device.kv_bytes", "device KV bytes", max(0, kv_bytes), "bytes", Provenance.RULE, note)
    if kv_bytes <= 0:
        _refuse_weights(sheet, request, weights.per_rank_bytes + other, total, free)
        return _plan(total, free, fraction, asked, weights, 0, None, request, free - weights.per_rank_bytes), None
    made = _pool(sheet, request, found, kv_bytes, shape)
    left = free - weights.per_rank_bytes - kv_bytes
    return _plan(total, free, fraction, asked, weights, kv_bytes, made, request, left), made


def _plan(
    total: int | None,
    free: int | None,
    fraction: float | None,
    asked: int | None,
    weights: WeightMemory,
    kv_bytes: int,
    made: Pool | None,
    request: PlanRequest,
    left: int | None,
) -> DevicePlan:
    tokens = made.tokens if made else 0
    return DevicePlan(
        total_bytes=total,
        free_bytes=free,
        static_fraction=fraction,
        static_bytes=asked,
        weights_bytes=weights.per_rank_bytes,
        state_bytes=None,
        kv_bytes=kv_bytes,
        kv_tokens=tokens,
        distinct_tokens=tokens * request.dp,
        reserve_bytes=free - asked if free is not None and asked is not None else None,
        left_bytes=left,
    )


def _pool(sheet: PlanBuilder, request: PlanRequest, found: list[Group], kv_bytes: int, shape: _Shape) -> Pool:
    kv_bytes = (
        kv_bytes * request.pp
    )  # a stage holds its share of the layers: tokens are as with all layers and pp times the bytes
    made = pool(found, kv_bytes, shape.block, shape.length, shape.in_flight)
    blocks = f"{made.blocks:,} blocks of {made.block_bytes:,} B"
    note = f"{blocks} hold {made.concurrency:.2f} requests of {shape.length:,} tokens"
    if len(found) == 1:
        note = f"{gb(kv_bytes)} // {made.block_bytes:,} B a block of {shape.block} tokens; {note}"
    sheet.put("device.kv_tokens", "device KV tokens", made.tokens, "tokens", Provenance.RULE, note)
    if made.concurrency < 1:
        longest = largest_length(found, kv_bytes, shape.block, shape.length, shape.in_flight)
        sheet.refuse(
            Cause.CTX_TOO_LONG_FOR_KV,
            f"one request of {shape.length:,} tokens needs more than the KV pool of {gb(kv_bytes)}: vLLM ends with an "
            "error",
            f"--context {longest}" if longest else "more KV memory: nothing fits",
        )
    return made


def _refuse_weights(sheet: PlanBuilder, request: PlanRequest, needed: int, total: int, free: int) -> None:
    fraction = math.ceil(needed / total * 100) / 100
    if fraction <= min(0.98, free / total):
        sheet.refuse(
            Cause.WEIGHTS_EXCEED_STATIC,
            f"weights and profile run of {gb(needed)} per rank exceed the budget",
            f"--gpu-memory-utilization above {fraction:g}",
        )
        return
    doubled = request.tp * 2
    while needed * request.tp / doubled > 0.9 * total and doubled < 1024:
        doubled *= 2
    sheet.refuse(
        Cause.NO_WINDOW,
        f"no utilization works: weights and profile run need {gb(needed)} of {gb(total)} per rank",
        f"--tp {doubled} (that many GPUs), smaller weights, or GPUs with more memory",
    )
