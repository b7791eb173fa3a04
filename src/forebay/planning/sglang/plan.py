"""A plan for SGLang: its rules in its units (0.5.23; paths under sglang/srt).

- ``--hicache-size`` is decimal GB a rank; the pool gets one page more (``mem_cache/pool_host/base.py``), and a pool
larger than
  (available - 10 GiB) // ranks of this host is refused there (``host_memory_budget_bytes``).
- The sparse-attention index has a host pool of its own beside it (``pool_host/dsa.py``): outside ``--hicache-size``.
- Neither size nor ratio given: ratio 2.0, reduced to 0.8 of that budget (``mem_cache/hicache_auto_size.py``).
- Latent KV is backed up by every rank: ``mla_host_dedup.py`` is there and only the Mooncake linker's broadcaster
imports it
  (``unified_cache/linker_mla_dedup.py``), which excludes HiCache (``arg_groups/hicache_hook.py``).
- Layout and io back end that do not go together are rewritten with a warning (``hicache_hook.py``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from forebay.causes import Cause
from forebay.model.geometry import ModelGeometry
from forebay.planning.arithmetic.gpu_memory import (
    GpuMemoryBudget,
    check_context_length,
    check_heads,
    gpu_memory_budget,
    record_concurrency,
)
from forebay.planning.arithmetic.host_memory import gb, replication
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.arithmetic.weight_memory import WeightMemory, record_weights
from forebay.planning.plan import DevicePlan, Plan, Provenance
from forebay.planning.request import PlanRequest
from forebay.planning.sglang.command import check_flags, command
from forebay.planning.sglang.device_memory import (
    DevicePoolSize,
    KVBytesPerToken,
    Layout,
    WeightLoad,
    cell,
    default_static_fraction,
    device_pool,
    largest_static_fraction,
    reserved_mib,
)
from forebay.planning.sglang.host_memory import plan_host

__all__ = ["plan_sglang"]

_MIB = 2**20
_SPARSE_PAGE = 64  # arg_groups/model_overrides/deepseek_v2.py: sparse attention sets it, unless it is given


def plan_sglang(request: PlanRequest) -> Plan:
    """Plan ``request`` for SGLang."""
    sheet, geometry = PlanBuilder(), request.model.geometry
    dp_attention = bool(request.flags.get("enable_dp_attention")) and request.tp % request.dp == 0
    layout = Layout(
        request.tp, request.dp, request.pp, request.dp if dp_attention else 1, int(request.flags.get("nnodes", 1))
    )
    check_flags(sheet, request)
    if request.flags.get("device") == "cpu":
        geometry = _padded_heads(sheet, geometry, layout.attention_tp)
    else:
        check_heads(sheet, geometry, layout.attention_tp)
    check_context_length(sheet, geometry, request.context)
    sparse = any(shape.index_dim for shape in geometry.layers)
    page = int(request.flags.get("page_size", _SPARSE_PAGE if sparse else 1))
    size = cell(geometry, layout.attention_tp, layout.pp, _kv_dtype(request, sparse))
    copies = replication(geometry.num_kv_heads, geometry.is_latent, layout.attention_tp)
    one_copy = size.device_bytes * layout.attention_tp * layout.pp // copies
    _put_cell(sheet, size, one_copy, copies, layout)
    weights = record_weights(sheet, request, layout.tp, layout.attention_tp, layout.pp)
    context = request.context or geometry.max_context
    device, pool = _device(sheet, request, layout, size, weights, page, context)
    limit = math.inf
    if pool and pool.window_tokens is not None:
        window = max((shape.window or 0) for shape in geometry.layers)
        limit = pool.window_tokens / (min(context, window) + page)
    if pool and pool.state_slots is not None:
        limit = min(limit, float(pool.state_slots))
    groups = layout.attention_dp * layout.replicas
    full_length = record_concurrency(
        sheet, request, pool.tokens if pool else None, context, must_fit=False, replicas=groups, limit=limit
    )
    planned = plan_host(sheet, request, layout, size, pool, page, copies, one_copy)
    return Plan(
        fits=not sheet.problems,
        server="sglang",
        server_version=request.version,
        model=request.model.name,
        architecture=geometry.architecture,
        ranks=layout.ranks,
        tp=request.tp,
        dp=request.dp,
        pp=request.pp,
        page_size=page,
        context_length=context,
        kv_bytes_per_token_per_rank=size.device_bytes,
        kv_bytes_per_token=one_copy,
        kv_replicated=copies > 1,
        state_bytes_per_request_per_rank=size.state_bytes,
        weights_bytes=weights.total_bytes,
        weights_per_rank_bytes=weights.per_rank_bytes,
        full_length_requests=full_length,
        device=device,
        host=planned.host,
        command=command(request, planned.hicache_size),
        env=request.env,
        problems=tuple(sheet.problems),
        warnings=tuple(sheet.warnings),
        steps=tuple(sheet.steps),
    )


def _padded_heads(sheet: PlanBuilder, geometry: ModelGeometry, tp: int) -> ModelGeometry:
    """On CPU SGLang adds KV heads until ``tp`` divides them, with the query heads that belong to them.

    Source: ``configs/update_config.py``, ``adjust_config_with_unaligned_cpu_tp``.
    """
    if geometry.is_latent or (geometry.num_heads % tp == 0 and geometry.num_kv_heads % tp == 0):
        return geometry
    kv_heads = -(-geometry.num_kv_heads // tp) * tp
    heads = kv_heads * (geometry.num_heads // geometry.num_kv_heads)
    sheet.warn(
        Cause.TP_NOT_DIVISIBLE,
        f"{geometry.num_heads} attention heads and {geometry.num_kv_heads} KV heads over {tp} ranks: SGLang on CPU "
        "pads them to "
        f"{heads} and {kv_heads}, and every token's KV grows with them",
        "a --tp-size that divides both",
    )
    layers = tuple(
        replace(shape, kv_heads=-(-shape.kv_heads // tp) * tp) if shape.kv_heads else shape for shape in geometry.layers
    )
    return replace(geometry, num_heads=heads, num_kv_heads=kv_heads, layers=layers)


def _kv_dtype(request: PlanRequest, sparse: bool) -> str | None:
    """Sparse attention stores fp8_e4m3 on GPUs of compute capability 10 and up when nothing is said
    (``arg_groups/overrides.py``).
    """
    if request.kv_dtype is not None or not sparse:
        return request.kv_dtype
    capability = next((gpu.compute_capability for gpu in request.gpus or () if gpu.compute_capability), "0")
    return "fp8_e4m3" if int(capability.partition(".")[0]) >= 10 else None


def _put_cell(sheet: PlanBuilder, size: KVBytesPerToken, one_copy: int, copies: int, layout: Layout) -> None:
    parts = [f"{size.full_bytes:,} B in layers that keep every token"]
    if size.window_bytes:
        parts.append(f"{size.window_bytes:,} B in sliding-window layers")
    if size.index_bytes:
        parts.append(f"{size.index_bytes:,} B of sparse-attention index")
    note = " + ".join(parts) + f", over {layout.attention_tp} attention ranks"
    sheet.put(
        "kv_bytes_per_token_per_rank", "KV a token per rank", size.device_bytes, "bytes", Provenance.FORMULA, note
    )
    note = "the same bytes on every rank" if copies > 1 else "each rank holds its heads"
    sheet.put(
        "kv_bytes_per_token", "KV a token, one copy", one_copy, "bytes", Provenance.FORMULA, f"{note} ({copies} copies)"
    )
    if size.state_bytes:
        note = "linear-attention and Mamba layers: one state a request, whatever its length"
        sheet.put(
            "state_bytes_per_request_per_rank", "state a request", size.state_bytes, "bytes", Provenance.FORMULA, note
        )


def _device(
    sheet: PlanBuilder,
    request: PlanRequest,
    layout: Layout,
    size: KVBytesPerToken,
    weights: WeightMemory,
    page: int,
    context: int,
) -> tuple[DevicePlan, DevicePoolSize | None]:
    flags = request.flags
    cap = flags.get("max_total_tokens")
    room = None if flags.get("device") == "cpu" else gpu_memory_budget(sheet, request, layout.ranks_per_host)
    if flags.get("device") == "cpu":
        sheet.warn(
            Cause.UNKNOWN,
            "on a CPU the device pool lives in host memory beside the host tier",
            "give --max-total-tokens so that the device pool has a known size",
        )
    if room is None or weights.per_rank_bytes is None:
        if room is not None:
            sheet.warn(Cause.UNKNOWN, "the weights' bytes are not known: device not planned", "give --weights-bytes")
        return _capped(sheet, size, cap, page, flags, layout)
    fraction = _fraction(sheet, request, layout, room)
    static = int(room.free_bytes * fraction)
    budget = static - weights.per_rank_bytes
    note = f"{gb(room.free_bytes)} free x {fraction:g} (the static share)"
    sheet.put("device.static_bytes", "static share", static, "bytes", Provenance.RULE, note)
    if budget <= 0:
        _refuse_weights(sheet, request, layout, size, weights.per_rank_bytes, room, context)
        return DevicePlan(room.total_bytes, room.free_bytes, fraction, static, weights.per_rank_bytes), None
    pool = device_pool(
        budget,
        size,
        page,
        cap=cap,
        swa_ratio=flags.get("swa_full_tokens_ratio"),
        mamba_ratio=flags.get("mamba_full_memory_ratio"),
        max_states=flags.get("max_mamba_cache_size"),
    )
    note = f"({gb(static)} - {gb(weights.per_rank_bytes)} weights) // {size.device_bytes:,} B, whole pages of {page}"
    sheet.put("device.kv_tokens", "device KV tokens", pool.tokens, "tokens", Provenance.RULE, note)
    if pool.tokens == 0:
        _refuse_weights(sheet, request, layout, size, weights.per_rank_bytes, room, context)
    distinct = _put_distinct(sheet, pool, layout)
    left = room.free_bytes - weights.per_rank_bytes - pool.kv_bytes - pool.state_bytes
    note = "activations, graphs and fragmentation live here"
    sheet.put("device.left_bytes", "left on the device", left, "bytes", Provenance.FORMULA, note)
    plan = DevicePlan(
        room.total_bytes,
        room.free_bytes,
        fraction,
        static,
        weights.per_rank_bytes,
        pool.state_bytes,
        pool.kv_bytes,
        pool.tokens,
        distinct,
        room.free_bytes - static,
        left,
    )
    return plan, pool if pool.tokens else None


def _capped(
    sheet: PlanBuilder, size: KVBytesPerToken, cap: int | None, page: int, flags: object, layout: Layout
) -> tuple[DevicePlan, DevicePoolSize | None]:
    """Without a device to measure, only ``--max-total-tokens`` says how large the pool is."""
    if cap is None:
        return DevicePlan(), None
    tokens = cap // page * page
    note = f"--max-total-tokens {cap:,} in whole pages of {page}"
    sheet.put("device.kv_tokens", "device KV tokens", tokens, "tokens", Provenance.GIVEN, note)
    window = int(tokens * 0.8) // page * page if size.window_bytes else None
    kv_bytes = tokens * (size.full_bytes + size.index_bytes) + (window or 0) * size.window_bytes
    pool = DevicePoolSize(tokens, kv_bytes, window)
    distinct = _put_distinct(sheet, pool, layout)
    return DevicePlan(kv_bytes=kv_bytes, kv_tokens=tokens, distinct_tokens=distinct), pool


def _put_distinct(sheet: PlanBuilder, pool: DevicePoolSize, layout: Layout) -> int:
    groups = layout.attention_dp * layout.replicas
    note = f"{pool.tokens:,} x {groups} groups of ranks with requests of their own"
    key = "device.distinct_tokens"
    return sheet.put(key, "distinct tokens on devices", pool.tokens * groups, "tokens", Provenance.FORMULA, note)


def _load(request: PlanRequest, layout: Layout, room: GpuMemoryBudget) -> WeightLoad:
    flags, geometry = request.flags, request.model.geometry
    return WeightLoad(
        gpu_mib=room.total_bytes / _MIB,
        tp=layout.tp,
        pp=layout.pp,
        attention_dp=layout.attention_dp,
        latent=geometry.is_latent,
        vision=geometry.vision,
        chunked_prefill=flags.get("chunked_prefill_size"),
        graph_batch=flags.get("cuda_graph_max_bs"),
        max_running=flags.get("max_running_requests"),
        graphs=not flags.get("disable_cuda_graph"),
    )


def _fraction(sheet: PlanBuilder, request: PlanRequest, layout: Layout, room: GpuMemoryBudget) -> float:
    given = request.flags.get("mem_fraction_static")
    if given is not None:
        return sheet.put(
            "device.static_fraction", "static fraction", float(given), "fraction", Provenance.GIVEN, "as given"
        )
    load = _load(request, layout, room)
    fraction = default_static_fraction(load)
    note = f"(GPU - {reserved_mib(load):,.0f} MiB for activations and graphs) / GPU"
    if load.vision:
        note += ", less for the vision tower"
    return sheet.put("device.static_fraction", "static fraction", fraction, "fraction", Provenance.RULE, note)


def _refuse_weights(
    sheet: PlanBuilder,
    request: PlanRequest,
    layout: Layout,
    size: KVBytesPerToken,
    weights: int,
    room: GpuMemoryBudget,
    context: int,
) -> None:
    """Too little for weights and KV: the fraction that would do, or that none does."""
    page = size.device_bytes * max(1, int(request.flags.get("page_size", 1)))
    load = _load(request, layout, room)
    usual, most = default_static_fraction(load), largest_static_fraction(load)
    fraction = math.ceil((weights + page) / room.free_bytes * 1000) / 1000
    text = f"weights of {gb(weights)} per rank exceed the static share of {gb(room.free_bytes)} free on the device"
    if fraction <= most:
        whole = math.ceil((weights + context * size.device_bytes) / room.free_bytes * 1000) / 1000
        fix = f"--mem-fraction-static {max(fraction, min(whole, most)):.3f}"
        if whole <= most:
            fix += f" (holds one request of {context:,} tokens; the weights alone need {fraction:.3f})"
        if max(fraction, min(whole, most)) > usual:
            fix += " with --chunked-prefill-size 2048 --cuda-graph-max-bs 8, which need less beside it"
        sheet.refuse(Cause.WEIGHTS_EXCEED_STATIC, text, fix)
        return
    doubled = layout.tp * 2
    while weights * layout.tp / doubled > most * room.free_bytes and doubled < 1024:
        doubled *= 2
    sheet.refuse(
        Cause.NO_WINDOW,
        f"no static fraction works: {text}; weights need more than {fraction:.3f} of it, activations and graphs leave "
        f"{most:.3f}",
        f"--tp {doubled} (that many GPUs), smaller weights, or GPUs with more memory",
    )
