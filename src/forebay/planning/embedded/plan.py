"""A plan for the embedded server. The sizes are ``forebay.kv.pool_sizes``'s, which the engine calls for its pools.

Everything lives in host memory here: weights and device pool in each rank's own memory, the host tier in one shared
region in /dev/shm, one copy of every head whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forebay.causes import Cause
from forebay.kv import pool_sizes as embedded
from forebay.kv.geometry_spec import kv_spec
from forebay.kv.spec import KVSpec
from forebay.model.parameters import BESIDE, from_geometry, rank_bytes, total_bytes
from forebay.planning.arithmetic.flag_parser import Flag, render
from forebay.planning.arithmetic.gpu_memory import check_context_length, check_heads, record_concurrency
from forebay.planning.arithmetic.host_memory import gb, replication
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.arithmetic.weight_memory import WeightMemory, record_weights
from forebay.planning.plan import DevicePlan, HostPlan, Plan, Provenance
from forebay.planning.request import PlanRequest
from forebay.sizes import format_size

__all__ = ["FLAGS", "plan_embedded"]

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "auto": None, None: None}

FLAGS: tuple[Flag, ...] = (
    Flag("tp", "int", ("--tp",)),
    Flag("dtype", "text", ("--dtype",), ("auto", "bfloat16", "float32")),
    Flag("context_length", "int", ("--context-length",)),
    Flag("page_size", "int", ("--page-size",)),
    Flag("device_cache", "size", ("--device-cache",), unit="in total over the ranks"),
    Flag("host_cache", "size", ("--host-cache",), unit="in total for the node"),
)


def plan_embedded(request: PlanRequest) -> Plan:
    """Plan ``request`` for the embedded server."""
    sheet, geometry, tp = PlanBuilder(), request.model.geometry, request.tp
    if request.dp != 1 or request.pp != 1:
        sheet.refuse(Cause.FLAG_CONFLICT, "the embedded server has tensor parallelism only", "--dp 1 --pp 1")
    divides = check_heads(sheet, geometry, tp)
    check_context_length(sheet, geometry, request.context)
    if geometry.has_recurrent:
        sheet.refuse(
            Cause.UNSUPPORTED_ARCHITECTURE,
            f"the embedded server has no linear-attention or Mamba layers ({geometry.model_type})",
            "--server sglang or --server vllm",
        )
    page = int(request.flags.get("page_size", embedded.PAGE_SIZE))
    spec = kv_spec(geometry, page, _DTYPE_BYTES.get(request.dtype))
    copies = replication(geometry.num_kv_heads, geometry.is_latent, tp)
    per_rank = spec.bytes_per_token_per_rank(tp) if divides else spec.bytes_per_token
    _put_cell(sheet, spec, per_rank, copies, tp)
    weights = _weights(sheet, request)
    device = _device(sheet, request, spec, per_rank, weights) if divides else DevicePlan()
    longest = geometry.max_context
    context = request.context or min(longest, device.kv_tokens or longest)
    full_length = record_concurrency(sheet, request, device.kv_tokens, context, must_fit=True)
    host = _host(sheet, request, spec, weights, device)
    return Plan(
        fits=not sheet.problems,
        server="embedded",
        server_version=request.version,
        model=request.model.name,
        architecture=geometry.architecture,
        ranks=tp,
        tp=tp,
        dp=request.dp,
        pp=request.pp,
        page_size=page,
        context_length=context,
        kv_bytes_per_token_per_rank=per_rank,
        kv_bytes_per_token=spec.bytes_per_token,
        kv_replicated=copies > 1,
        state_bytes_per_request_per_rank=0,
        weights_bytes=weights.total_bytes,
        weights_per_rank_bytes=weights.per_rank_bytes,
        full_length_requests=full_length,
        device=device,
        host=host,
        command=_command(request),
        env=request.env,
        problems=tuple(sheet.problems),
        warnings=tuple(sheet.warnings),
        steps=tuple(sheet.steps),
    )


def _put_cell(sheet: PlanBuilder, spec: KVSpec, per_rank: int, copies: int, tp: int) -> None:
    note = " + ".join(
        f"{len(group.layers)} {group.name} layers x {group.bytes_per_token // len(group.layers):,} B"
        + (f" (window {group.window})" if group.window else "")
        for group in spec.groups
    )
    sheet.put("kv_bytes_per_token", "KV a token, one copy", spec.bytes_per_token, "bytes", Provenance.FORMULA, note)
    note = f"{'replicated' if copies > 1 else 'sharded'} over {tp} ranks" if tp > 1 else "one rank"
    sheet.put("kv_bytes_per_token_per_rank", "KV a token per rank", per_rank, "bytes", Provenance.FORMULA, note)


def _weights(sheet: PlanBuilder, request: PlanRequest) -> WeightMemory:
    """What the server holds: the language model, as it is stored; GGUF becomes bf16 once.
    Tied embeddings are held once.
    """
    model, tp, geometry = request.model, request.tp, request.model.geometry
    beside = [item for item in model.components if item.name in BESIDE]
    if beside and request.weights_bytes is None:
        names = " and ".join(dict.fromkeys(item.name for item in beside))
        sheet.put("weights_not_read_bytes", "not read", total_bytes(beside), "bytes", Provenance.HEADER, names)
        rest = tuple(item for item in model.components if item not in beside)
        model = replace(model, components=rest)
        request = replace(request, model=model)
    if model.kind != "gguf" or request.weights_bytes is not None:
        weights = record_weights(sheet, request, tp, tp, 1)
    else:
        components = from_geometry(geometry)
        total = sum(item.size_bytes for item in components)
        share = rank_bytes(components, geometry.num_kv_heads, tp, tp)
        note = "GGUF weights are converted to bf16 once, then loaded as that"
        sheet.put("weights_bytes", "weights, one copy", total, "bytes", Provenance.FORMULA, note)
        sheet.put("weights_per_rank_bytes", "weights per rank", share, "bytes", Provenance.FORMULA, f"TP {tp}")
        weights = WeightMemory(total, share)
    return weights


def _device(sheet: PlanBuilder, request: PlanRequest, spec: KVSpec, per_rank: int, weights: WeightMemory) -> DevicePlan:
    tp, available = request.tp, request.host.available_bytes
    asked = request.device_cache_bytes
    if asked is None:
        total, how, note = (
            embedded.default_device_bytes(available),
            Provenance.RULE,
            "an eighth of what is available, at most 1 GiB",
        )
    else:
        total, how, note = asked, Provenance.GIVEN, "--device-cache, in total over the ranks"
    sheet.put("device_cache_bytes", "device cache in total", total, "bytes", how, note)
    pages = embedded.device_pages(spec, tp, total)
    page_bytes = embedded.device_page_bytes(spec, tp)
    if pages == 0:
        sheet.refuse(
            Cause.NO_WINDOW,
            f"a device cache of {format_size(total)} holds no page: one takes {format_size(page_bytes)} over {tp} "
            "ranks",
            f"--device-cache {page_bytes * 64}B",
        )
    tokens = pages * spec.page_size
    kv_bytes = embedded.device_bytes_per_rank(spec, tp, pages)
    note = f"{total:,} B // {page_bytes:,} B a page of {spec.page_size} tokens over {tp} ranks = {pages:,} pages"
    sheet.put("device.kv_tokens", "device KV tokens", tokens, "tokens", Provenance.RULE, note)
    sheet.put(
        "device.kv_bytes", "device pool per rank", kv_bytes, "bytes", Provenance.FORMULA, f"{tokens:,} x {per_rank:,} B"
    )
    return DevicePlan(weights_bytes=weights.per_rank_bytes, kv_bytes=kv_bytes, kv_tokens=tokens, distinct_tokens=tokens)


def _host(
    sheet: PlanBuilder, request: PlanRequest, spec: KVSpec, weights: WeightMemory, device: DevicePlan
) -> HostPlan:
    room, tp = request.host, request.tp
    given = request.reserve_bytes
    reserve = embedded.default_host_reserve(room.available_bytes) if given is None else given
    how = Provenance.RULE if given is None else Provenance.GIVEN
    note = "as given" if given is not None else "a twentieth of what is available, between 0.5 and 8 GiB"
    sheet.put("host.available_bytes", "host available", room.available_bytes, "bytes", room.how, room.note)
    sheet.put("host.reserve_bytes", "host reserve", reserve, "bytes", how, note)
    before = tp * ((weights.per_rank_bytes or 0) + (device.kv_bytes or 0))
    free = room.available_bytes - reserve - before
    largest = max(0, min([free, *([room.shm_free_bytes] if room.shm_free_bytes is not None else [])])) // 10**6 * 10**6
    note = "(available - reserve - weights - device pools), and what /dev/shm has free"
    sheet.put("host.largest_safe_bytes", "largest safe host cache in total", largest, "bytes", Provenance.RULE, note)
    asked = request.host_cache_bytes or 0
    pages: Sequence[int] = embedded.host_pages(spec, asked) if asked else [0] * len(spec.groups)
    region = embedded.host_region_bytes(spec, pages) if asked else 0
    tokens = pages[0] * spec.page_size
    _check_host(sheet, request, asked, before, reserve, free, largest)
    if asked:
        note = f"{min(pages):,} to {max(pages):,} pages a group" if len(pages) > 1 else f"{pages[0]:,} pages"
        sheet.put(
            "host.total_bytes",
            "host region",
            region,
            "bytes",
            Provenance.RULE,
            f"{note} + {embedded.STATUS_BYTES} B head",
        )
        note = "one copy of every head, shared by all ranks"
        sheet.put("host.distinct_tokens", "distinct tokens on the host", tokens, "tokens", Provenance.RULE, note)
        if device.kv_tokens and tokens <= device.kv_tokens:
            sheet.warn(
                Cause.HOST_POOL_SMALLER_THAN_DEVICE,
                f"the host tier's {tokens:,} tokens are no more than the device pool's {device.kv_tokens:,}: useless",
                "a larger --host-cache, or a smaller --device-cache",
            )
    left = room.available_bytes - before - region
    sheet.put(
        "host.left_bytes", "left on the host", left, "bytes", Provenance.FORMULA, "available - weights - all pools"
    )
    return HostPlan(
        available_bytes=room.available_bytes,
        reserve_bytes=reserve,
        per_rank_bytes=region // tp,
        allocated_per_rank_bytes=region // tp,
        total_bytes=region,
        per_rank_tokens=tokens,
        copies=1.0,
        distinct_tokens=tokens,
        distinct_bytes=tokens * spec.bytes_per_token,
        largest_safe_per_rank_bytes=largest // tp,
        left_bytes=left,
    )


def _check_host(
    sheet: PlanBuilder, request: PlanRequest, asked: int, before: int, reserve: int, free: int, largest: int
) -> None:
    room = request.host
    if free < 0:
        sheet.refuse(
            Cause.WEIGHTS_EXCEED_STATIC,
            f"weights and device pools of {gb(before)} in total and a reserve of {gb(reserve)} against "
            f"{gb(room.available_bytes)} available",
            "a smaller --device-cache, a smaller model, or free memory",
        )
        return
    if asked > free:
        limit = " (the control group's limit)" if room.limited_by_cgroup else ""
        sheet.refuse(
            Cause.HOST_POOL_TOO_BIG,
            f"a host cache of {gb(asked)} in total, weights and device pools of {gb(before)} and a reserve of "
            f"{gb(reserve)} "
            f"against {gb(room.available_bytes)} available{limit}",
            f"--host-cache {largest // 10**6}MB",
        )
    elif room.shm_free_bytes is not None and asked > room.shm_free_bytes:
        sheet.refuse(
            Cause.SHM_TOO_SMALL,
            f"a host cache of {gb(asked)} lives in /dev/shm, which has {gb(room.shm_free_bytes)} free",
            f"--host-cache {largest // 10**6}MB, or enlarge /dev/shm (docker: --shm-size)",
        )


def _command(request: PlanRequest) -> tuple[str, ...]:
    settings = dict(request.flags)
    for dest, said in (
        ("tp", request.tp if request.tp != 1 else None),
        ("dtype", request.dtype),
        ("context_length", request.context),
        ("device_cache", request.device_cache_bytes),
        ("host_cache", request.host_cache_bytes),
    ):
        if said is not None:
            settings[dest] = said
    words = ["forebay", "serve", request.model.name]
    by_dest = {flag.dest: flag for flag in FLAGS}
    for dest, value in settings.items():
        words += render(by_dest[dest], value)
    return (*words, *request.passthrough)
