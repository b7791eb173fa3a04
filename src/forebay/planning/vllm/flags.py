"""vLLM's flags that decide memory (``vllm/engine/arg_utils.py``, 0.32.0)."""

from __future__ import annotations

from forebay.planning.arithmetic.flag_parser import Flag

__all__ = ["FLAGS", "flag"]


def _flag(dest: str, kind: str, *aliases: str, choices: tuple[str, ...] = (), unit: str = "") -> Flag:
    return Flag(dest, kind, (f"--{dest.replace('_', '-')}", *aliases), choices, unit)


FLAGS: tuple[Flag, ...] = (
    _flag("model", "text"),
    _flag("tensor_parallel_size", "int", "-tp"),
    _flag("pipeline_parallel_size", "int", "-pp"),
    _flag("data_parallel_size", "int", "-dp"),
    _flag("nnodes", "int"),
    _flag("dtype", "text"),
    _flag("kv_cache_dtype", "text"),
    _flag("max_model_len", "count"),
    _flag("max_num_seqs", "int"),
    _flag("max_num_batched_tokens", "count"),
    _flag("block_size", "int"),
    _flag("gpu_memory_utilization", "float", "--device-memory-utilization"),
    _flag("kv_cache_memory_bytes", "count", unit="bytes per GPU"),
    _flag("num_gpu_blocks_override", "int"),
    _flag("enforce_eager", "switch"),
    _flag("kv_offloading_size", "float", unit="GiB, in total over the ranks"),
    _flag("kv_offloading_backend", "text", choices=("native", "lmcache")),
    _flag("kv_transfer_config", "json"),
    _flag("disable_hybrid_kv_cache_manager", "switch", "--no-disable-hybrid-kv-cache-manager"),
    _flag("enable_prefix_caching", "switch", "--no-enable-prefix-caching"),
)

_BY_DEST = {item.dest: item for item in FLAGS}


def flag(dest: str) -> Flag:
    """The flag that sets ``dest``."""
    return _BY_DEST[dest]
