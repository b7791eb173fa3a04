"""vLLM's host tier: native offloading, or LMCache. Rules and sources: see ``forebay.planning.vllm.plan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.causes import Cause
from forebay.planning.arithmetic.host_memory import default_reserve, gb, record_host, refuse_too_big
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.arithmetic.version_rules import rule
from forebay.planning.plan import HostPlan, Provenance
from forebay.planning.request import PlanRequest
from forebay.planning.vllm.command import offload_gib
from forebay.planning.vllm.device_memory import Pool
from forebay.sizes import GB, GIB

__all__ = ["plan_host"]

_ALIGNMENT = 4096  # SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT: whole pages of memory
_LMCACHE_DEFAULT_GIB = 5.0
_IN_PROCESS_LMCACHE = ("LMCacheConnector", "LMCacheConnectorV1")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for: bytes in total, copies of each byte it keeps, and in words."""

    total_bytes: int
    copies: int
    words: str
    flag: str
    in_shm: bool


def plan_host(
    sheet: PlanBuilder, request: PlanRequest, one_copy: int, copies: int, block: int, made: Pool | None
) -> HostPlan:
    """Work out the host tier and refuse what does not fit."""
    room, ranks = request.host, request.tp * request.pp * request.dp
    given = request.reserve_bytes
    reserve = default_reserve(ranks) if given is None else given
    record_host(sheet, room, reserve, Provenance.ASSUMED if given is None else Provenance.GIVEN, ranks)
    free = max(0, room.available_bytes - reserve)
    asked = _asked(sheet, request, copies)
    in_shm = asked is None or asked.in_shm
    if in_shm and room.shm_free_bytes is not None:
        free = min(free, room.shm_free_bytes)
    largest = free // ranks // GB * GB
    note = (
        "(available - reserve, and what /dev/shm has free) / ranks, whole GB"
        if in_shm
        else "(available - reserve) / ranks"
    )
    sheet.put("host.largest_safe_per_rank_bytes", "largest safe per rank", largest, "bytes", Provenance.FORMULA, note)
    if asked is None:
        return HostPlan(room.available_bytes, reserve, 0, 0, 0, 0, 1.0, 0, 0, largest, room.available_bytes)
    _check(sheet, request, asked, ranks, reserve, largest)
    chunk = one_copy * asked.copies * block
    aligned = -(-chunk // _ALIGNMENT) * _ALIGNMENT if asked.in_shm else chunk
    tokens = asked.total_bytes // request.dp // aligned * block
    distinct = tokens * request.dp
    _put(sheet, request, asked, ranks, distinct)
    _warn(sheet, asked, one_copy, tokens, made)
    return HostPlan(
        available_bytes=room.available_bytes,
        reserve_bytes=reserve,
        per_rank_bytes=asked.total_bytes // ranks,
        allocated_per_rank_bytes=tokens // block * aligned // max(1, request.tp * request.pp),
        total_bytes=asked.total_bytes,
        per_rank_tokens=tokens,
        copies=float(asked.copies),
        distinct_tokens=distinct,
        distinct_bytes=distinct * one_copy,
        largest_safe_per_rank_bytes=largest,
        left_bytes=room.available_bytes - asked.total_bytes,
    )


def _asked(sheet: PlanBuilder, request: PlanRequest, copies: int) -> _Asked | None:
    flags = request.flags
    transfer: dict[str, Any] = flags.get("kv_transfer_config") or {}
    connector, extra = transfer.get("kv_connector"), transfer.get("kv_connector_extra_config") or {}
    gib = offload_gib(request)
    if gib is not None:
        if flags.get("kv_offloading_backend") == "lmcache":
            sheet.warn(
                Cause.FLAG_CONFLICT,
                f"--kv-offloading-size {gib:g} is ignored with the lmcache back end: the LMCache server's own size "
                "counts",
                "size the LMCache server, and plan its memory as --host-reserve",
            )
            return None
        if transfer:
            sheet.warn(
                Cause.FLAG_CONFLICT,
                f"--kv-offloading-size replaces the connector {connector!r} of --kv-transfer-config",
                "give one of the two",
            )
        stored_once = copies > 1 and request.pp == 1 and rule("vllm.offload_deduplicates_latent", request.version)
        words = f"--kv-offloading-size {gib:g} GiB in total"
        return _Asked(round(gib * GIB), 1 if stored_once else copies, words, "--kv-offloading-size", True)
    if connector == "OffloadingConnector" and extra.get("cpu_bytes_to_use"):
        return _Asked(int(extra["cpu_bytes_to_use"]), copies, "cpu_bytes_to_use in total", "cpu_bytes_to_use", True)
    if connector in _IN_PROCESS_LMCACHE:
        return _lmcache(request, copies, extra)
    return None


def _lmcache(request: PlanRequest, copies: int, extra: dict[str, Any]) -> _Asked:
    """LMCache in the process: every rank allocates; of latent KV only the first rank's copy is filled."""
    text = extra.get("lmcache.max_local_cpu_size", request.env.get("LMCACHE_MAX_LOCAL_CPU_SIZE", _LMCACHE_DEFAULT_GIB))
    per_rank = float(text)
    ranks = request.tp * request.pp * request.dp
    words = f"{ranks} × {per_rank:g} GiB (LMCache max_local_cpu_size, per rank)"
    return _Asked(round(per_rank * GIB) * ranks, copies, words, "LMCACHE_MAX_LOCAL_CPU_SIZE", False)


def _check(sheet: PlanBuilder, request: PlanRequest, asked: _Asked, ranks: int, reserve: int, largest: int) -> None:
    room = request.host
    if asked.flag == "LMCACHE_MAX_LOCAL_CPU_SIZE":
        fix = f"LMCACHE_MAX_LOCAL_CPU_SIZE={largest // GIB} (GiB per rank)"
    elif asked.flag == "cpu_bytes_to_use":
        fix = f"cpu_bytes_to_use {largest * ranks}"
    else:
        fix = f"--kv-offloading-size {largest * ranks // GIB} (GiB in total)"
    if asked.total_bytes + reserve > room.available_bytes:
        refuse_too_big(sheet, room, asked.words, asked.total_bytes, reserve, fix)
    elif asked.in_shm and room.shm_free_bytes is not None and asked.total_bytes > room.shm_free_bytes:
        sheet.refuse(
            Cause.SHM_TOO_SMALL,
            f"the offload region of {gb(asked.total_bytes)} is a file in /dev/shm, which has {gb(room.shm_free_bytes)} "
            "free",
            f"{fix}, or enlarge /dev/shm (docker: --shm-size, Kubernetes: an emptyDir with medium Memory)",
        )


def _put(sheet: PlanBuilder, request: PlanRequest, asked: _Asked, ranks: int, distinct: int) -> None:
    sheet.put("host.total_bytes", "host pools in total", asked.total_bytes, "bytes", Provenance.GIVEN, asked.words)
    per_rank = asked.total_bytes // ranks
    sheet.put("host.per_rank_bytes", "host pool per rank", per_rank, "bytes", Provenance.FORMULA, f"over {ranks} ranks")
    note = f"{asked.copies} copies of each byte"
    sheet.put("host.distinct_tokens", "distinct tokens on the host", distinct, "tokens", Provenance.FORMULA, note)
    left = request.host.available_bytes - asked.total_bytes
    sheet.put("host.left_bytes", "left on the host", left, "bytes", Provenance.FORMULA, "available less the pools")


def _warn(sheet: PlanBuilder, asked: _Asked, one_copy: int, tokens: int, made: Pool | None) -> None:
    if made is not None and 0 < tokens <= made.tokens:
        sheet.warn(
            Cause.HOST_POOL_SMALLER_THAN_DEVICE,
            f"the host tier's {tokens:,} tokens are no more than the device pool's {made.tokens:,}: useless",
            "a larger host tier, or none",
        )
    if asked.copies > 1:
        sheet.warn(
            Cause.OFFLOAD_OVERALLOCATES,
            f"KV is replicated: {gb(asked.total_bytes)} keep {gb(asked.total_bytes / asked.copies)} of distinct cache",
            f"stored once it would be {asked.total_bytes // one_copy:,} tokens (native offloading on one node does, "
            "from 0.32)",
        )
