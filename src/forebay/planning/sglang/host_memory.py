"""SGLang's host tier: one pool a rank, the largest size that is safe, and how much of it is the same tokens again.

Rules (0.5.23, paths under sglang/srt/mem_cache): ``pool_host/base.py`` ``HostKVCache.__init__`` for tokens and the page
more, ``host_memory_budget_bytes`` for the share of a rank, ``hybrid_cache/hybrid_pool_assembler.py``
``_split_hicache_size`` for hybrid models, ``hicache_auto_size.py`` where neither size nor ratio is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.causes import Cause
from forebay.planning.arithmetic.host_memory import default_reserve, gb, largest_unit, record_host, refuse_too_big
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.arithmetic.version_rules import rule
from forebay.planning.plan import HostPlan, Provenance
from forebay.planning.request import PlanRequest
from forebay.planning.sglang.command import wants_host
from forebay.planning.sglang.device_memory import DevicePoolSize, KVBytesPerToken, Layout
from forebay.sizes import GB, GIB

__all__ = ["HostPools", "PlannedHostTier", "host_pools", "plan_host"]

_OWN_RESERVE = 10 * GIB
_AUTO_RATIO, _AUTO_FRACTION, _AUTO_SLACK = 2.0, 0.8, 0.05
_SWA_RATIO, _MAMBA_RATIO = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class HostPools:
    """One rank's host pools."""

    tokens: int
    pool_bytes: tuple[int, ...]
    """Each pool SGLang builds: KV, then window or state, then the index."""

    @property
    def total_bytes(self) -> int:
        return sum(self.pool_bytes)


@dataclass(frozen=True, slots=True)
class PlannedHostTier:
    """The host plan, and the flag that makes it where the user spoke in total bytes."""

    host: HostPlan
    hicache_size: int | None


def host_pools(size_bytes: float, size: KVBytesPerToken, pool: DevicePoolSize | None, page: int) -> HostPools:
    """The pools that ``--hicache-size`` of ``size_bytes`` a rank makes."""
    second = _second_share(size, pool)
    tokens = _tokens(size_bytes * (1 - second), size.full_bytes or size.window_bytes, page)
    found = [tokens * (size.full_bytes or size.window_bytes)]
    if size.window_bytes and size.full_bytes:
        found.append(_tokens(size_bytes * second, size.window_bytes, page) * size.window_bytes)
    elif size.state_bytes:
        found.append(max(1, int(size_bytes * second // size.state_bytes)) * size.state_bytes)
    if size.index_bytes:
        found.append(tokens * size.index_bytes)
    return HostPools(tokens, tuple(found))


def _tokens(size_bytes: float, token_bytes: int, page: int) -> int:
    return (int(size_bytes // token_bytes) // page + 1) * page


def _second_share(size: KVBytesPerToken, pool: DevicePoolSize | None) -> float:
    """The part of ``--hicache-size`` that goes to the window or state pool: as the device pools' bytes are divided."""
    if size.window_bytes and size.full_bytes:
        if pool and pool.window_tokens is not None:
            window = pool.window_tokens * size.window_bytes
            return window / (window + pool.tokens * size.full_bytes)
        return _SWA_RATIO * size.window_bytes / (_SWA_RATIO * size.window_bytes + size.full_bytes)
    if size.state_bytes:
        if pool and pool.state_bytes:
            return pool.state_bytes / (pool.state_bytes + pool.kv_bytes)
        return _MAMBA_RATIO / (1 + _MAMBA_RATIO)
    return 0.0


def plan_host(
    sheet: PlanBuilder,
    request: PlanRequest,
    layout: Layout,
    size: KVBytesPerToken,
    pool: DevicePoolSize | None,
    page: int,
    copies: int,
    one_copy: int,
) -> PlannedHostTier:
    """Work out the host tier and refuse what does not fit."""
    room, ranks = request.host, layout.ranks_per_host
    given = request.reserve_bytes
    reserve = default_reserve(ranks) if given is None else given
    record_host(sheet, room, reserve, Provenance.ASSUMED if given is None else Provenance.GIVEN, ranks)
    own = (room.available_bytes - _OWN_RESERVE) // (
        ranks if rule("sglang.host_budget_per_rank", request.version) else 1
    )

    def fits(pools: HostPools) -> bool:
        return max(pools.pool_bytes) <= own and pools.total_bytes * ranks + reserve <= room.available_bytes

    guess = max(0, (room.available_bytes - reserve) // ranks // GB)
    largest = largest_unit(lambda g: fits(host_pools(g * GB, size, pool, page)), guess)
    pool_limit = f"({gb(room.available_bytes)} - 10 GiB) / {ranks}"
    note = f"largest whole GB with {ranks} pools + reserve <= available and a pool <= {pool_limit}"
    sheet.put("host.largest_safe_per_rank_bytes", "largest safe per rank", largest * GB, "bytes", Provenance.RULE, note)
    asked, size_flag = _asked(sheet, request, layout, size, pool, page, own)
    if asked is None:
        return PlannedHostTier(
            _host_plan(sheet, request, layout, HostPools(0, (0,)), 0, reserve, largest, copies, one_copy), None
        )
    pools, per_rank, words = asked
    if not fits(pools):
        fix = f"--hicache-size {largest}" if largest else "no host tier of 1 GB per rank fits: leave it out"
        asked_text = f"{ranks} × {words}"
        if len(pools.pool_bytes) > 1 and size.index_bytes:
            asked_text += f" (with {gb(pools.pool_bytes[-1])} each for the sparse-attention index)"
        refuse_too_big(sheet, room, asked_text, per_rank * ranks, reserve, fix)
    _warn_useless(sheet, pools, pool)
    _warn_locked(sheet, request, pools.total_bytes)
    host = _host_plan(sheet, request, layout, pools, per_rank, reserve, largest, copies, one_copy)
    return PlannedHostTier(host, size_flag)


def _asked(
    sheet: PlanBuilder,
    request: PlanRequest,
    layout: Layout,
    size: KVBytesPerToken,
    pool: DevicePoolSize | None,
    page: int,
    own: int,
) -> tuple[tuple[HostPools, int, str] | None, int | None]:
    """((pools, bytes a rank, in words), the flag to add) that was asked for; None: no host tier."""
    if not wants_host(request):
        return None, None
    flags = request.flags
    gigabytes, flag = max(0, int(flags.get("hicache_size") or 0)), None
    if not gigabytes and request.host_cache_bytes:
        flag = gigabytes = request.host_cache_bytes // layout.ranks // GB
        if not gigabytes:
            sheet.refuse(
                Cause.BAD_FLAG,
                f"--host-cache {gb(request.host_cache_bytes)} in total is less than 1 GB for each of {layout.ranks} "
                "ranks; "
                "SGLang's --hicache-size counts whole GB per rank",
                f"--host-cache {layout.ranks}GB or more",
            )
            return None, None
        note = f"{gb(request.host_cache_bytes)} in total // {layout.ranks} ranks, whole GB"
        sheet.put("hicache_size", "--hicache-size", flag, "count", Provenance.RULE, note)
    if gigabytes:
        pools = host_pools(gigabytes * GB, size, pool, page)
        index = pools.pool_bytes[-1] if size.index_bytes else 0
        return (pools, gigabytes * GB + index, f"{gigabytes} GB"), flag
    ratio = flags.get("hicache_ratio")
    if ratio is None:
        return _auto(sheet, request, size, pool, page, own), None
    if pool is None:
        sheet.warn(Cause.UNKNOWN, "--hicache-ratio is of a device pool that is not known here", "give --gpus")
        return None, None
    pools = _by_ratio(float(ratio), size, pool, page)
    return (pools, pools.total_bytes, f"{gb(pools.total_bytes)} (ratio {ratio:g})"), None


def _by_ratio(ratio: float, size: KVBytesPerToken, pool: DevicePoolSize, page: int) -> HostPools:
    tokens = (int(pool.tokens * ratio) // page + 1) * page
    found = [tokens * (size.full_bytes or size.window_bytes)]
    if pool.window_tokens is not None:
        found.append((int(pool.window_tokens * ratio) // page + 1) * page * size.window_bytes)
    elif pool.state_slots is not None:
        found.append(int(pool.state_slots * ratio) * size.state_bytes)
    if size.index_bytes:
        found.append(tokens * size.index_bytes)
    return HostPools(tokens, tuple(found))


def _auto(
    sheet: PlanBuilder, request: PlanRequest, size: KVBytesPerToken, pool: DevicePoolSize | None, page: int, own: int
) -> tuple[HostPools, int, str] | None:
    """Neither size nor ratio: twice the device pool, or what 0.8 of the rank's budget allows."""
    if not rule("sglang.hicache_autosize", request.version):
        if pool is None:
            return None
        pools = _by_ratio(_AUTO_RATIO, size, pool, page)
        return pools, pools.total_bytes, f"{gb(pools.total_bytes)} (the default ratio 2.0)"
    fraction = float(request.flags.get("hicache_host_memory_fraction", _AUTO_FRACTION))
    budget = max(0, int(own * fraction))
    if budget == 0:
        sheet.refuse(
            Cause.HOST_POOL_TOO_BIG,
            f"nothing is left of {gb(request.host.available_bytes)} for a host tier after SGLang's reserve of 10 GiB",
            "free host memory, or leave out --enable-hierarchical-cache",
        )
        return None
    usable = budget * (1 - _AUTO_SLACK)
    if pool is None:
        pools = host_pools(usable, size, None, page)
        return pools, pools.total_bytes, f"{gb(pools.total_bytes)} (auto-sized; at most, the device pool is not known)"
    device_bytes = pool.kv_bytes - pool.tokens * size.index_bytes + pool.state_bytes
    ratio = min(_AUTO_RATIO, usable / max(1, device_bytes))
    note = f"min(2.0, {fraction:g} x {gb(own)} x 0.95 / {gb(device_bytes)})"
    sheet.put("hicache_ratio", "auto-sized ratio", ratio, "ratio", Provenance.RULE, note)
    pools = _by_ratio(ratio, size, pool, page)
    return pools, pools.total_bytes, f"{gb(pools.total_bytes)} (auto-sized, ratio {ratio:.3f})"


def _warn_useless(sheet: PlanBuilder, pools: HostPools, pool: DevicePoolSize | None) -> None:
    if pool is not None and pools.tokens <= pool.tokens:
        sheet.warn(
            Cause.HOST_POOL_SMALLER_THAN_DEVICE,
            f"the host pool's {pools.tokens:,} tokens are no more than the device pool's {pool.tokens:,}: with "
            "write_through "
            "it holds what the device holds, and is useless",
            "a larger --hicache-size, or no host tier",
        )


def _warn_locked(sheet: PlanBuilder, request: PlanRequest, pool_bytes: int) -> None:
    """RDMA registers the host pool, which counts against the locked-memory limit (pinning for the GPU does not)."""
    limit, backend = request.host.memlock_bytes, request.flags.get("hicache_storage_backend")
    if limit is not None and backend in ("mooncake", "nixl", "mori") and pool_bytes > limit:
        sheet.warn(
            Cause.PIN_FAILED,
            f"storage back end {backend} registers the host pool of {gb(pool_bytes)} for RDMA; the locked-memory limit "
            f"is {gb(limit)}",
            "ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )


def _host_plan(
    sheet: PlanBuilder,
    request: PlanRequest,
    layout: Layout,
    pools: HostPools,
    per_rank: int,
    reserve: int,
    largest: int,
    copies: int,
    one_copy: int,
) -> HostPlan:
    ranks, groups = layout.ranks_per_host, layout.attention_dp * layout.replicas
    total = per_rank * ranks
    distinct = pools.tokens * groups
    left = request.host.available_bytes - total
    if pools.tokens:
        sheet.put(
            "host.per_rank_bytes",
            "host pool per rank",
            per_rank,
            "bytes",
            Provenance.RULE,
            f"{pools.tokens:,} tokens a rank",
        )
        sheet.put(
            "host.total_bytes", "host pools in total", total, "bytes", Provenance.FORMULA, f"{ranks} ranks on this host"
        )
        note = f"{pools.tokens:,} a rank x {groups}: ranks of one group hold the same tokens"
        sheet.put("host.distinct_tokens", "distinct tokens on the host", distinct, "tokens", Provenance.FORMULA, note)
        sheet.put("host.left_bytes", "left on the host", left, "bytes", Provenance.FORMULA, "available less the pools")
        if copies > 1:
            _warn_copies(sheet, pools, total, distinct, one_copy, copies, layout)
    return HostPlan(
        available_bytes=request.host.available_bytes,
        reserve_bytes=reserve,
        per_rank_bytes=per_rank,
        allocated_per_rank_bytes=pools.total_bytes,
        total_bytes=total,
        per_rank_tokens=pools.tokens,
        copies=float(copies),
        distinct_tokens=distinct,
        distinct_bytes=total // copies,
        largest_safe_per_rank_bytes=largest * GB,
        left_bytes=left,
    )


def _warn_copies(
    sheet: PlanBuilder, pools: HostPools, total: int, distinct: int, one_copy: int, copies: int, layout: Layout
) -> None:
    """What nobody notices: every rank's pool holds the same tokens."""
    once, spread = total // one_copy, pools.tokens * layout.tp
    note = f"{gb(total)} // {one_copy:,} B, if each byte were stored once (SGLang does not under HiCache)"
    sheet.put("host.tokens_if_stored_once", "tokens if stored once", once, "tokens", Provenance.FORMULA, note)
    note = f"--dp-size {layout.tp} --enable-dp-attention: each rank keeps its own requests' tokens"
    sheet.put("host.tokens_with_dp_attention", "tokens with DP attention", spread, "tokens", Provenance.FORMULA, note)
    sheet.warn(
        Cause.OFFLOAD_OVERALLOCATES,
        f"KV is replicated: {copies} ranks' host pools hold the same tokens, so {gb(total)} keep {gb(total / copies)} "
        "of distinct "
        f"cache ({distinct:,} tokens of {one_copy:,} B)",
        f"stored once, {gb(total)} would hold {once:,} tokens (SGLang does not under HiCache); with --dp-size "
        f"{layout.tp} "
        f"--enable-dp-attention each of {layout.tp} ranks caches its own requests: {spread:,} tokens",
    )
