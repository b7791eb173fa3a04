"""Host memory: pools too big, killed for memory, pinning, vLLM's offload region."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import floor_to, host_pool_size, ranks_of, say
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Kind, Priority, Requirement, Rule
from forebay.operation.doctor.silent_ends import host_demand
from forebay.sizes import GB, GIB, format_binary, format_size

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)


def _sglang_pool(found: EventMatch) -> str:
    asked, free = found.number("asked") or 0.0, found.number("free") or 0.0
    return host_pool_size(asked, free, found.base.launch.decimal("hicache_ratio"), ranks_of(found))


def _vllm_cpu_pool(found: EventMatch) -> str:
    free, asked = found.number("free") or 0.0, found.number("asked") or 0.0
    ranks = ranks_of(found)
    value = max(int(floor_to(free * 0.9 / (ranks or 1), 1)), 1)
    note = f" (per rank; {ranks} ranks)" if ranks and ranks > 1 else ""
    return f"set VLLM_CPU_KVCACHE_SPACE={value}{note} (GiB, an integer), or --kv-cache-memory-bytes {value}G: {asked:g} GiB was asked for and {free:g} GiB is free"


def _cpu_allocation(found: EventMatch) -> str:
    asked = found.number("bytes")
    piece = f"{format_binary(asked)} in one piece" if asked else "an allocation"
    return (
        f"the machine (its cgroup limit, its overcommit rule or `ulimit -v`) refused {piece}: free host memory, ask for a smaller pool, or "
        "raise the limit; `free -b`, `ulimit -v` and memory.max show them"
    )


def _lmcache_total(found: EventMatch) -> str:
    size, ranks = found.number("size") or 0.0, ranks_of(found)
    if not ranks:
        return (
            "lower max_local_cpu_size: it is GB per rank, and the sum over the ranks of a host must fit its free memory"
        )
    total = f"max_local_cpu_size is per rank: {ranks} x {size:g} GB = {format_size(size * ranks * GB)} of pinned host memory"
    free = found.base.machine.host_available_bytes or found.base.machine.host_memory_bytes
    if free:
        return (
            f"{total}; the machine has {format_size(free)}: set it to {floor_to(free / GB * 0.8 / ranks, 1):g} or less"
        )
    return f"{total}: set it to (free host memory x 0.8) / {ranks}"


def _lmcache_is_silent(found: EventMatch) -> bool:
    """The log ends while the pool is being allocated: no error, nothing after."""
    last = next((entry.line.text for entry in reversed(found.base.transcript.entries) if entry.line.text.strip()), "")
    least = max(found.base.transcript.ranks, default=0) + 1  # a rank that wrote a line is there
    total = (found.number("size") or 0.0) * GB * (ranks_of(found) or least)
    room = found.base.machine.host_available_bytes or found.base.machine.host_memory_bytes or 400 * GB
    return total >= room and found.base.transcript.up is None and "LMCacheEngine" in last


def _only_tracker_lines(found: EventMatch) -> bool:
    """Not one line of the server itself: the whole tree was gone before it could write."""
    texts = [entry.line.text for entry in found.base.transcript.entries if entry.line.text.strip()]
    return len(texts) == 1 and (found.number("count") or 0) >= 3


def _oom_fix(found: EventMatch) -> str:
    demand = host_demand(found.base)
    fraction = found.base.launch.decimal("mem_fraction_static")
    look = "`dmesg -T | grep -i oom` and memory.events show the kill"
    if demand is not None and demand.ranks:
        total = format_size(demand.total_bytes)
        return (
            f"the host pools alone are {demand.ranks} x {format_size(demand.per_rank_bytes)} = {total} ({demand.setting} is per rank): make "
            f"it smaller, or raise the memory limit; {look}"
        )
    if demand is not None:
        return f"each rank asks for {format_size(demand.per_rank_bytes)} of host memory ({demand.setting}): make it smaller, or raise the memory limit; {look}"
    if fraction and fraction > 1:
        return f"--mem-fraction-static={fraction:g} asks for more than there is: set 0.8 or less"
    lower = {
        "sglang": "lower --hicache-size or --mem-fraction-static (on a CPU or unified memory), or pass --weight-loader-disable-mmap",
        "vllm": "lower --kv-offloading-size, LMCache's max_local_cpu_size, --swap-space or VLLM_CPU_KVCACHE_SPACE",
    }.get(found.base.server, "make its host pools smaller")
    return f"give it more host memory or ask for less: {lower}; weights while loading can need twice their size on unified memory; {look}"


def _in_bytes(number: float, unit: str) -> float:
    factors = {"GiB": GIB, "GB": GB, "MiB": 2**20, "MB": 10**6}
    return number * factors.get(unit, 1)


def _cgroup_number(found: EventMatch, name: str) -> float:
    wanted = pattern(rf"^\s*{name}[: ]+(?P<n>[\d.]+) ?(?P<unit>[GM]i?B)?\b")
    index = found.base.transcript.search(wanted)
    if index is None:
        return 0.0
    match = wanted.search(found.base.transcript.entries[index].line.text)
    return _in_bytes(float(match["n"]), match["unit"] or "") if match else 0.0


def _offload_dominates(found: EventMatch) -> bool:
    shmem = _in_bytes(found.number("shmem") or 0.0, found.text("unit"))
    current = _cgroup_number(found, r"memory\.current")
    if shmem < 8 * GIB:
        return False
    asked = found.base.launch.asked.get("kv_offloading_size", "")
    if asked.replace(".", "", 1).isdigit():
        return shmem > 1.5 * float(asked) * GIB
    return bool(current) and shmem > 0.7 * current and shmem > 2 * _cgroup_number(found, "anon")


def _halve_offload(found: EventMatch) -> str:
    shmem = _in_bytes(found.number("shmem") or 0.0, found.text("unit"))
    return (
        f"plan for about 1.92 times --kv-offloading-size: {format_binary(shmem)} in use suggests {shmem / 1.92 / GIB:.0f} was asked for. "
        f"To use {format_binary(shmem)} / 1.92 of host memory, ask for {shmem / 1.92 / 1.92 / GIB:.0f} (GiB in total over the ranks)"
    )


RULES = (
    Rule(
        "sglang_host_pool",
        Cause.HOST_POOL_TOO_BIG,
        "sglang_host_pool",
        "The host pool of {asked} GB per rank does not fit: {free} GB of host memory is free after SGLang's reserve.",
        _sglang_pool,
        servers=SGLANG,
        cases=("index_63270536137", "sglang/fail_hicache_size_1000"),
    ),
    Rule(
        "sglang_host_pool_other",
        Cause.HOST_POOL_TOO_BIG,
        "sglang_host_pool_other",
        "A host pool does not fit the host's memory.",
        say("ask for a smaller host pool; `forebay plan` computes the largest that fits"),
    ),
    Rule(
        "vllm_cpu_kv_space",
        Cause.HOST_POOL_TOO_BIG,
        "vllm_cpu_kv_space",
        "The KV pool of {asked} GiB does not fit: {free} of {total} GiB of host memory is free.",
        _vllm_cpu_pool,
        servers=VLLM,
        cases=("vllm/fail_kvspace_over_ram",),
    ),
    Rule(
        "vllm_cpu_utilization",
        Cause.HOST_POOL_TOO_BIG,
        "vllm_cpu_utilization",
        "On the CPU, {free} of {asked} GiB is free: less than the memory utilization asks for.",
        _vllm_cpu_pool,
        servers=VLLM,
    ),
    Rule(
        "cpu_allocator",
        Cause.HOST_POOL_TOO_BIG,
        "cpu_allocator",
        "The host refused an allocation of {bytes} bytes.",
        _cpu_allocation,
        needs=(Requirement("cpu_kv_pool_named", "block"),),
    ),
    Rule(
        "cpu_allocator_elsewhere",
        Cause.RUNTIME_OR_INIT_OOM,
        "cpu_allocator_elsewhere",
        "The host refused an allocation.",
        _cpu_allocation,
        priority=Priority.GENERAL,
    ),
    Rule(
        "lmcache_total",
        Cause.HOST_POOL_TOO_BIG,
        "lmcache_total",
        "LMCache pins {size} GB of host memory in every rank, and the log ends while it allocates.",
        _lmcache_total,
        servers=VLLM,
        check=_lmcache_is_silent,
        confidence=Confidence.LIKELY,
        cases=("LMCache_LMCache_792",),
    ),
    Rule(
        "lmcache_alloc",
        Cause.HOST_POOL_TOO_BIG,
        "lmcache_alloc",
        "A host pool could not be allocated.",
        say("lower the host pool (LMCache: max_local_cpu_size, per rank); `forebay plan` computes what fits"),
    ),
    Rule(
        "silent_death",
        Cause.HOST_POOL_TOO_BIG,
        "silent_death",
        "Nothing but the resource tracker's clean-up is left of the run: every process was gone before it could say why, as when "
        "a pinned host pool outgrows the machine. This is inferred from what is missing.",
        say(
            "the tracker's line is fallout. Add up the host pools (LMCache's max_local_cpu_size and SGLang's --hicache-size are per "
            "rank): the sum over the ranks must stay below the host's memory; look for the kill with `dmesg -T | grep -i oom`"
        ),
        priority=Priority.SECONDARY,
        servers=VLLM,
        check=_only_tracker_lines,
        confidence=Confidence.LIKELY,
        cases=("LMCache_LMCache_949",),
    ),
    Rule(
        "container_oom",
        Cause.HOST_OOM_KILLED,
        "container_oom",
        "The kernel (or the container's memory limit) killed a process for want of host memory.",
        _oom_fix,
        excludes=(Requirement("oom_killer_suggested"),),
        cases=("index_62152995213",),
    ),
    Rule(
        "child_minus_nine",
        Cause.HOST_OOM_KILLED,
        "child_minus_nine",
        "A child process was killed by SIGKILL (-9): the mark of the kernel's out-of-memory killer.",
        _oom_fix,
        priority=Priority.SECONDARY,
        check=lambda found: not found.base.observed.oom_denied and not found.base.transcript.has_served,
        cases=("index_69399795908", "sglang/fail_mem_fraction_1_5"),
    ),
    Rule(
        "offload_double",
        Cause.OFFLOAD_OVERALLOCATES,
        "offload_double",
        "Shared memory holds {shmem} {unit}, nearly all of what the group uses: the offload region takes about twice what the "
        "flag asks for, and the kernel cannot reclaim it.",
        lambda found: _halve_offload(found),
        kind=Kind.DEGRADED,
        servers=VLLM,
        check=lambda found: _offload_dominates(found),
        cases=("vllm-project_vllm_53042",),
    ),
)
