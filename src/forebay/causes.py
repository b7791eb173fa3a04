"""Every reason Forebay can give for a refusal or a failure: one enum, each with an anchor in docs/causes.md.

The planner's refusals and the doctor's causes share it, so that "refused before the start" and "died of it" are one
word.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Cause", "docs_anchor"]


class Cause(StrEnum):
    """A stable code; prose about it lives in docs/causes.md under the same name."""

    HOST_POOL_TOO_BIG = "host_pool_too_big"
    HOST_OOM_KILLED = "host_oom_killed"
    PIN_FAILED = "pin_failed"
    SHM_FULL = "shm_full"
    SHM_TOO_SMALL = "shm_too_small"
    WEIGHTS_EXCEED_STATIC = "weights_exceed_static"
    NO_WINDOW = "no_window"
    CTX_TOO_LONG_FOR_KV = "ctx_too_long_for_kv"
    CTX_TOO_LONG_FOR_MODEL = "ctx_too_long_for_model"
    KV_POOL_COLLAPSED = "kv_pool_collapsed"
    KV_UNDERCOUNTED = "kv_undercounted"
    CUDAGRAPH_OOM = "cudagraph_oom"
    RUNTIME_OR_INIT_OOM = "runtime_or_init_oom"
    BUDGET_OVERRUN = "budget_overrun"
    GPU_BUSY = "gpu_busy"
    GPU_TOO_SMALL = "gpu_too_small"
    GPU_UNBALANCED = "gpu_unbalanced"
    PROFILING_RACE = "profiling_race"
    MAMBA_BLOCKS = "mamba_blocks"
    HMA_DISABLED = "hma_disabled"
    PORT_IN_USE = "port_in_use"
    LEFTOVER_SCHEDULER = "leftover_scheduler"
    FLAG_CONFLICT = "flag_conflict"
    FLAG_RENAMED = "flag_renamed"
    BAD_FLAG = "bad_flag"
    CHECKPOINT_MISSING = "checkpoint_missing"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    TOKENIZER_MISSING = "tokenizer_missing"
    UNSUPPORTED_ARCHITECTURE = "unsupported_architecture"
    JIT_TOOLCHAIN_MISSING = "jit_toolchain_missing"
    ATTENTION_BACKEND_UNSUPPORTED = "attention_backend_unsupported"
    HICACHE_KERNEL_UNSUPPORTED = "hicache_kernel_unsupported"
    HICACHE_WRITE_ONLY = "hicache_write_only"
    CACHE_DISABLED = "cache_disabled"
    CACHE_TIER_FULL = "cache_tier_full"
    CACHE_NEVER_HIT = "cache_never_hit"
    RETRACT_STORM = "retract_storm"
    HICACHE_NOT_ON_DECODE = "hicache_not_on_decode"
    HOST_POOL_SMALLER_THAN_DEVICE = "host_pool_smaller_than_device"
    OFFLOAD_OVERALLOCATES = "offload_overallocates"
    KV_REPORT_MISREAD = "kv_report_misread"
    LMCACHE_ALIGN = "lmcache_align"
    MOONCAKE_PEER_RACE = "mooncake_peer_race"
    MOONCAKE_UNREACHABLE = "mooncake_unreachable"
    RDMA_GID = "rdma_gid"
    NCCL_ERROR = "nccl_error"
    SLOW_RANK_LOAD = "slow_rank_load"
    ENGINE_READY_TIMEOUT = "engine_ready_timeout"
    START_STALLED = "start_stalled"
    ENGINE_HUNG = "engine_hung"
    HEALTH_STALL = "health_stall"
    ENGINE_BUG = "engine_bug"
    ASSERTION = "assertion"
    CUDA_DRIVER_MISMATCH = "cuda_driver_mismatch"
    LICENSE_OR_AUTH = "license_or_auth"
    WORKER_KILLED = "worker_killed"
    FRONT_KILLED = "front_killed"
    STOPPED_ON_REQUEST = "stopped_on_request"
    DEPENDENCY_MISMATCH = "dependency_mismatch"
    DEPENDENCY_MISSING = "dependency_missing"
    CONNECTOR_UNSUPPORTED = "connector_unsupported"
    TP_NOT_DIVISIBLE = "tp_not_divisible"
    NUMA_BINDING = "numa_binding"
    BIND_FAILED = "bind_failed"
    UNKNOWN = "unknown"


def docs_anchor(cause: str) -> str:
    """The page and anchor that explain ``cause``."""
    return f"docs/causes.md#{cause}"
