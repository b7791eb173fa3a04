"""Host memory: pools too big, killed for memory, pinning, vLLM's offload region."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import floor_to, host_pool_size, ranks_of, say
from forebay.operation.doctor.rule import Found, Kind, Need, Priority, Rule, Where, pattern
from forebay.sizes import GB, GIB, format_binary, format_size

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)
_ALLOCATES_HOST = Need(
    pattern(
        r"pool_host|memory_pool_host|hierarchical|HiCache|hiradix|host_pool|alloc_with_(?:host_register|pin_memory)|"
        r"pin(?:ned)?_memory|MemoryAllocator|return torch\.empty\(|init_kv_buffer|cpu_offload|kv_offload|LMCache|"
        r"lmcache/v\d/memory_management|alloc_pinned"
    ),
    "block",
)


def _sglang_pool(found: Found) -> str:
    asked, free = found.number("asked") or 0.0, found.number("free") or 0.0
    ratio = found.transcript.asked.get("hicache_ratio", "")
    number = float(ratio) if ratio.replace(".", "", 1).isdigit() else None
    return host_pool_size(asked, free, number, ranks_of(found))


def _vllm_cpu_pool(found: Found) -> str:
    free, asked = found.number("free") or 0.0, found.number("asked") or 0.0
    ranks = ranks_of(found)
    value = max(int(floor_to(free * 0.9 / ranks, 1)), 1)
    note = f" (per rank; {ranks} ranks)" if ranks > 1 else ""
    return f"set VLLM_CPU_KVCACHE_SPACE={value}{note} (GiB, an integer), or --kv-cache-memory-bytes {value}G: {asked:g} GiB was asked for and {free:g} GiB is free"


def _cpu_allocation(found: Found) -> str:
    asked = found.number("bytes") or 0.0
    return (
        f"the machine (or its ulimit -v) refused {format_binary(asked)} in one piece: ask for a smaller pool, or raise the limit; "
        "`ulimit -v` and `free -b` show both"
    )


def _lmcache_total(found: Found) -> str:
    size, ranks = found.number("size") or 0.0, ranks_of(found)
    return (
        f"max_local_cpu_size is per rank: {ranks} x {size:g} GB = {format_size(size * ranks * GB)} of pinned host memory. "
        f"Set it to (free host memory x 0.8) / {ranks}: with 768 GB free, {floor_to(768 * 0.8 / ranks, 1):g}"
    )


def _lmcache_is_silent(found: Found) -> bool:
    """The pool is large and the log ends while it is being allocated: no error, nothing after."""
    size = found.number("size") or 0.0
    last = next((entry.line.text for entry in reversed(found.transcript.entries) if entry.line.text.strip()), "")
    return size * ranks_of(found) >= 400 and found.transcript.up is None and "LMCacheEngine" in last


def _only_tracker_lines(found: Found) -> bool:
    """Not one line of the server itself: the whole tree was gone before it could write."""
    texts = [entry.line.text for entry in found.transcript.entries if entry.line.text.strip()]
    return len(texts) == 1 and (found.number("count") or 0) >= 3


def _oom_fix(found: Found) -> str:
    pools = found.transcript.settings.get("host_pool_bytes")
    fraction = found.transcript.asked.get("mem_fraction_static", "")
    if pools is not None and isinstance(pools.value, (int, float)):
        ranks = max(ranks_of(found), 1)
        total = format_size(float(pools.value) * ranks)
        return (
            f"the host pools alone are {ranks} x {format_size(pools.value)} = {total} (the size is per rank): divide it, "
            "or raise the memory limit; `dmesg -T | grep -i oom` and memory.events show the kill"
        )
    if fraction and fraction.replace(".", "", 1).isdigit() and float(fraction) > 1:
        return f"--mem-fraction-static={fraction} asks for more than there is: set 0.8 or less"
    return (
        "give it more memory or ask for less: weights while loading can need twice their size on unified memory; lower "
        "--hicache-size, the memory fraction or the CPU KV space; `dmesg -T | grep -i oom` shows what was killed at what size"
    )


def _pin_fix(found: Found) -> str:
    size = found.number("size")
    chunk = "set SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB=8 to register in pieces"
    if size is None:
        return f"pin less: halve --hicache-size or --hicache-ratio; {chunk}; `ulimit -l` must be unlimited"
    return (
        f"{format_binary(size)} was to be pinned in one call: {chunk}, or halve the pool to {format_size(size / 2)} a rank; "
        "`ulimit -l` must be unlimited; on ROCm the pinnable total is far below the host's RAM"
    )


def _aligned(found: Found) -> str:
    size, align = int(found.number("size") or 0), int(found.number("align") or 1)
    down = size // align * align
    return (
        f"use a size that is a multiple: {down} bytes ({down / GIB:.4f} GiB) or {down + align} bytes; or set "
        "a chunk size that divides it (max_local_cpu_size and chunk_size of LMCache)"
    )


def _in_bytes(number: float, unit: str) -> float:
    factors = {"GiB": GIB, "GB": GB, "MiB": 2**20, "MB": 10**6}
    return number * factors.get(unit, 1)


def _cgroup_number(found: Found, name: str) -> float:
    wanted = pattern(rf"^\s*{name}[: ]+(?P<n>[\d.]+) ?(?P<unit>[GM]i?B)?\b")
    index = found.transcript.search(wanted)
    if index is None:
        return 0.0
    match = wanted.search(found.transcript.entries[index].line.text)
    return _in_bytes(float(match["n"]), match["unit"] or "") if match else 0.0


def _offload_dominates(found: Found) -> bool:
    shmem = _in_bytes(found.number("shmem") or 0.0, found.text("unit"))
    current = _cgroup_number(found, r"memory\.current")
    if shmem < 8 * GIB:
        return False
    asked = found.transcript.asked.get("kv_offloading_size", "")
    if asked.replace(".", "", 1).isdigit():
        return shmem > 1.5 * float(asked) * GIB
    return bool(current) and shmem > 0.7 * current and shmem > 2 * _cgroup_number(found, "anon")


def _halve_offload(found: Found) -> str:
    shmem = _in_bytes(found.number("shmem") or 0.0, found.text("unit"))
    return (
        f"plan for about 1.92 times --kv-offloading-size: {format_binary(shmem)} in use suggests {shmem / 1.92 / GIB:.0f} was asked for. "
        f"To use {format_binary(shmem)} / 1.92 of host memory, ask for {shmem / 1.92 / 1.92 / GIB:.0f} (GiB in total over the ranks)"
    )


RULES = (
    Rule(
        "sglang_host_pool",
        Cause.HOST_POOL_TOO_BIG,
        pattern(
            r"Not enough host memory available\. Requesting (?P<asked>[\d.]+) GB but only have (?P<free>-?[\d.]+) GB free"
        ),
        "The host pool of {asked} GB per rank does not fit: {free} GB of host memory is free after SGLang's reserve.",
        _sglang_pool,
        servers=SGLANG,
        cases=("index_63270536137", "sglang/fail_hicache_size_1000"),
    ),
    Rule(
        "sglang_host_pool_other",
        Cause.HOST_POOL_TOO_BIG,
        pattern(
            r"[Nn]ot enough (?:host|CPU) memory\b|host memory (?:pool )?(?:is )?(?:not enough|insufficient)|Insufficient host memory"
        ),
        "A host pool does not fit the host's memory.",
        say("ask for a smaller host pool; `forebay plan` computes the largest that fits"),
    ),
    Rule(
        "vllm_cpu_kv_space",
        Cause.HOST_POOL_TOO_BIG,
        pattern(
            r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation is less than "
            r"requested memory for kv \((?P<asked>[\d.]+) GiB\)"
        ),
        "The KV pool of {asked} GiB does not fit: {free} of {total} GiB of host memory is free.",
        _vllm_cpu_pool,
        servers=VLLM,
        cases=("vllm/fail_kvspace_over_ram",),
    ),
    Rule(
        "vllm_cpu_utilization",
        Cause.HOST_POOL_TOO_BIG,
        pattern(
            r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<asked>[\d.]+) GiB\) on startup is less than desired CPU memory utilization"
        ),
        "On the CPU, {free} of {asked} GiB is free: less than the memory utilization asks for.",
        _vllm_cpu_pool,
        servers=VLLM,
    ),
    Rule(
        "cpu_allocator",
        Cause.HOST_POOL_TOO_BIG,
        pattern(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<bytes>\d+) bytes"
        ),
        "The host refused an allocation of {bytes} bytes.",
        _cpu_allocation,
        needs=(
            Need(pattern(r"kv_cache|kv_offload|host_pool|pool_host|MemoryPool|memory_pool|HiCache|offload"), "block"),
        ),
    ),
    Rule(
        "cpu_allocator_elsewhere",
        Cause.RUNTIME_OR_INIT_OOM,
        pattern(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<bytes>\d+) bytes|^MemoryError\b|Cannot allocate memory|std::bad_alloc"
        ),
        "The host refused an allocation.",
        _cpu_allocation,
        tier=Priority.GENERAL,
    ),
    Rule(
        "lmcache_total",
        Cause.HOST_POOL_TOO_BIG,
        pattern(r"LMCache Configuration: .*'max_local_cpu_size': '?(?P<size>[\d.]+)(?: GB)?'?"),
        "LMCache pins {size} GB of host memory in every rank, and the log ends while it allocates.",
        _lmcache_total,
        where=Where.ANY,
        servers=VLLM,
        check=_lmcache_is_silent,
        cases=("LMCache_LMCache_792",),
    ),
    Rule(
        "lmcache_alloc",
        Cause.HOST_POOL_TOO_BIG,
        pattern(
            r"(?:Failed to allocate|Unable to allocate|could not allocate).{0,60}(?:pinned|host|CPU) memory|max_local_cpu_size.{0,80}(?:exceed|larger|too (?:big|large))",
            ignore_case=True,
        ),
        "A host pool could not be allocated.",
        say("lower the host pool (LMCache: max_local_cpu_size, per rank); `forebay plan` computes what fits"),
    ),
    Rule(
        "silent_death",
        Cause.HOST_POOL_TOO_BIG,
        pattern(r"resource_tracker: There appear to be (?P<count>\d+) leaked shared_memory objects"),
        "Nothing but the resource tracker's clean-up is left of the run: every process was gone before it could say why, as when "
        "a pinned host pool outgrows the machine. This is inferred from what is missing.",
        say(
            "the tracker's line is fallout. Add up the host pools (LMCache's max_local_cpu_size and SGLang's --hicache-size are per "
            "rank): the sum over the ranks must stay below the host's memory; look for the kill with `dmesg -T | grep -i oom`"
        ),
        where=Where.ANY,
        tier=Priority.FALLOUT,
        servers=VLLM,
        check=_only_tracker_lines,
        cases=("LMCache_LMCache_949",),
    ),
    Rule(
        "container_oom",
        Cause.HOST_OOM_KILLED,
        pattern(
            r"\bOOMKilled\b|oom[-_ ]kill(?:er|ed)?\b.*(?:invoked|constraint|process)|Out of memory: Kill(?:ed)? process|Memory cgroup out of memory|killed due to (?:the node running low on memory|memory pressure)|exceed(?:ed|ing) (?:its )?memory limit",
            ignore_case=True,
        ),
        "The kernel (or the container's memory limit) killed a process for want of host memory.",
        _oom_fix,
        where=Where.ANY,
        excludes=(Need(pattern(r"common cause is the OS OOM killer")),),
        cases=("index_62152995213",),
    ),
    Rule(
        "child_minus_nine",
        Cause.HOST_OOM_KILLED,
        pattern(
            r"scheduler (?:died during initialization|is dead)\b.*\(?[Ee]xit ?code: -9\)?|Exit code: -9\b|"
            r"Failed core proc\(s\): \{[^}]*: -9|(?:died|crashed|exited)\b.*exit ?code:? -9\b"
        ),
        "A child process was killed by SIGKILL (-9): the mark of the kernel's out-of-memory killer.",
        _oom_fix,
        tier=Priority.FALLOUT,
        where=Where.ANY,
        check=lambda found: not found.transcript.observed.oom_denied and not found.transcript.has_served,
        cases=("index_69399795908", "sglang/fail_mem_fraction_1_5"),
    ),
    Rule(
        "host_register",
        Cause.PIN_FAILED,
        pattern(r"(?:cuda|hip)HostRegister failed(?:.*?\bsize=(?P<size>\d+))?"),
        "Pinning the host pool failed: the driver refused to register the buffer.",
        _pin_fix,
        rules_out=(
            (Cause.HOST_POOL_TOO_BIG, "the memory was allocated; registering it with the driver is what failed"),
        ),
        cases=("sgl-project_sglang_39744", "SemiAnalysisAI_InferenceX_2146"),
    ),
    Rule(
        "pin_by_torch",
        Cause.PIN_FAILED,
        pattern(
            r"CUDA error: (?:invalid argument|OS call failed or operation not supported|out of memory|operation not supported)|HIP error: (?:invalid argument|out of memory)"
        ),
        "The pinned allocation of the host pool was refused; it reads like a GPU error and is about host memory.",
        _pin_fix,
        needs=(_ALLOCATES_HOST,),
        rules_out=((Cause.ENGINE_BUG, "the failing call is the allocation of a pinned host buffer"),),
        cases=("sgl-project_sglang_7666",),
    ),
    Rule(
        "pin_without_cuda",
        Cause.PIN_FAILED,
        pattern(
            r"Torch not compiled with CUDA enabled|pin_memory=True requires a CUDA|[Nn]o pinned memory allocator|Cannot access accelerator device when none is available"
        ),
        "The host pool is to be pinned, and this torch has no accelerator to pin it for.",
        say(
            "install a torch built for the GPU, or leave the host tier off on a machine without one (drop --enable-hierarchical-cache)"
        ),
        needs=(_ALLOCATES_HOST,),
        cases=("sglang/fail_hicache_unpatched_cuda_host_register",),
    ),
    Rule(
        "pinned_allocation",
        Cause.PIN_FAILED,
        pattern(r"(?:cudaMallocHost|cudaHostAlloc|hipHostMalloc)\b.{0,40}(?:failed|returned|error)"),
        "Page-locked host memory could not be had: this is the machine's memory, not the GPU's, whatever the error's name says.",
        _pin_fix,
        rules_out=((Cause.RUNTIME_OR_INIT_OOM, "the failing call allocates host memory"),),
    ),
    Rule(
        "pin_limit",
        Cause.PIN_FAILED,
        pattern(
            r"(?:mlock|memlock|RLIMIT_MEMLOCK).{0,60}(?:fail|limit|exceed|Cannot allocate)|[Ff]ailed to pin (?:host )?memory|ibv_reg_mr.*Cannot allocate memory"
        ),
        "Locked memory is limited, so the host pool could not be pinned.",
        say("raise the limit: `ulimit -l unlimited` (docker --ulimit memlock=-1, LimitMEMLOCK=infinity in systemd)"),
    ),
    Rule(
        "lmcache_align",
        Cause.LMCACHE_ALIGN,
        pattern(r"Buffer size (?P<size>\d+) must be a multiple of align bytes (?P<align>\d+)"),
        "LMCache's buffer of {size} bytes is no multiple of its chunk of {align} bytes.",
        lambda found: _aligned(found),
        servers=VLLM,
        cases=("LMCache_LMCache_1909",),
    ),
    Rule(
        "offload_double",
        Cause.OFFLOAD_OVERALLOCATES,
        pattern(r"^\s*shmem[: ]+(?P<shmem>[\d.]+) ?(?P<unit>[GM]i?B)?\b"),
        "Shared memory holds {shmem} {unit}, nearly all of what the group uses: the offload region takes about twice what the "
        "flag asks for, and the kernel cannot reclaim it.",
        lambda found: _halve_offload(found),
        kind=Kind.DEGRADED,
        where=Where.ANY,
        servers=VLLM,
        check=lambda found: _offload_dominates(found),
        cases=("vllm-project_vllm_53042",),
    ),
)
