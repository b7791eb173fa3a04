"""Pinned memory: registering host pools with the driver, locked-memory limits, and other host-side registers."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.activities import ProcessActivity
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import say
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Priority, Requirement, Rule
from forebay.sizes import GIB, format_binary, format_size

__all__ = ["RULES"]

VLLM = ("vllm",)


def _pin_fix(found: EventMatch) -> str:
    size = found.number("size")
    limit = "`ulimit -l` must be unlimited (docker --ulimit memlock=-1)"
    rocm = (
        "; on ROCm the pinnable total is far below the host's RAM"
        if found.base.launch.platform.startswith("AMD")
        else ""
    )
    what = f"{format_binary(size)} was to be pinned in one call: " if size else ""
    half = f" to {format_size(size / 2)} per rank" if size else ""
    if "lmcache_named" in found.base.events:
        return f"{what}pin less: lower LMCache's max_local_cpu_size (GB per rank){half}; {limit}{rocm}"
    if found.base.server == "sglang":
        return f"{what}set SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB=8 to register in pieces, or halve --hicache-size or --hicache-ratio{half}; {limit}{rocm}"
    if found.base.server == "vllm":
        return f"{what}pin less: lower --kv-offloading-size (cpu_bytes_to_use of the connector){half}; {limit}{rocm}"
    return f"{what}pin less: make the host pool smaller{half}; {limit}{rocm}"


def _register_fix(found: EventMatch) -> str:
    limit = "raise the limit of locked memory: `ulimit -l unlimited` (docker --ulimit memlock=-1, LimitMEMLOCK=infinity in systemd)"
    if found.text("errno") in ("[14]", "[22]"):
        return (
            "the address is GPU memory that the network card cannot register: load nvidia_peermem (or use dmabuf), or register less; "
            f"for host memory {limit}"
        )
    if "Failed to register" in found.line.text or "egistration" in found.line.text:
        return f"{limit}; register less: a smaller segment (MOONCAKE_GLOBAL_SEGMENT_SIZE) or pool; some cards limit one region to 64 GiB"
    return limit


def _aligned(found: EventMatch) -> str:
    size, align = int(found.number("size") or 0), int(found.number("align") or 1)
    down = size // align * align
    return (
        f"use a size that is a multiple: {down} bytes ({down / GIB:.4f} GiB) or {down + align} bytes; or set "
        "a chunk size that divides it (max_local_cpu_size and chunk_size of LMCache)"
    )


RULES = (
    Rule(
        "host_register",
        Cause.PIN_FAILED,
        "host_register",
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
        "pin_by_torch",
        "The pinned allocation of the host pool was refused; it reads like a GPU error and is about host memory.",
        _pin_fix,
        activities=(ProcessActivity.HOST_POOL,),
        rules_out=((Cause.ENGINE_BUG, "the failing call is the allocation of a pinned host buffer"),),
    ),
    Rule(
        "pin_invalid_argument",
        Cause.PIN_FAILED,
        "cuda_invalid_argument",
        "A tensor was to be made in pinned memory and the driver refused it: device memory that runs out has another message.",
        _pin_fix,
        needs=(Requirement("tensor_created", "block"),),
        rules_out=((Cause.ENGINE_BUG, "the failing call is the allocation of a pinned host buffer"),),
        confidence=Confidence.LIKELY,
        cases=("sgl-project_sglang_7666",),
    ),
    Rule(
        "pin_without_cuda",
        Cause.PIN_FAILED,
        "pin_without_cuda",
        "The host pool is to be pinned, and this torch has no accelerator to pin it for.",
        say(
            "install a torch built for the GPU, or leave the host tier off on a machine without one (drop --enable-hierarchical-cache)"
        ),
        activities=(ProcessActivity.HOST_POOL,),
        cases=("sglang/fail_hicache_unpatched_cuda_host_register",),
    ),
    Rule(
        "pinned_allocation",
        Cause.PIN_FAILED,
        "pinned_allocation",
        "Page-locked host memory could not be had: this is the machine's memory, not the GPU's, whatever the error's name says.",
        _pin_fix,
        rules_out=((Cause.RUNTIME_OR_INIT_OOM, "the failing call allocates host memory"),),
    ),
    Rule(
        "pin_limit",
        Cause.PIN_FAILED,
        "pin_limit",
        "Memory could not be locked or registered for the network card.",
        _register_fix,
        rules_out=((Cause.RUNTIME_OR_INIT_OOM, "the call that failed locks memory that is there"),),
    ),
    Rule(
        "host_register_warned",
        Cause.PIN_FAILED,
        "host_register_warned",
        "The driver refused to register the host pool, and the start does not end: copies from unpinned memory are slow or fail.",
        _pin_fix,
        priority=Priority.GENERAL,
        check=lambda found: not found.base.life.came_up,
    ),
    Rule(
        "lmcache_align",
        Cause.LMCACHE_ALIGN,
        "lmcache_align",
        "LMCache's buffer of {size} bytes is no multiple of its chunk of {align} bytes.",
        _aligned,
        servers=VLLM,
        cases=("LMCache_LMCache_1909",),
    ),
)
