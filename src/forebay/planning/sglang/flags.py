"""SGLang's flags that decide memory: names, aliases and units of ``sglang/srt/arg_groups/fields`` (0.5.23)."""

from __future__ import annotations

from forebay.planning.arithmetic.flag_parser import Flag

__all__ = ["FLAGS", "flag"]


def _flag(dest: str, kind: str, *aliases: str, choices: tuple[str, ...] = (), unit: str = "") -> Flag:
    return Flag(dest, kind, (f"--{dest.replace('_', '-')}", *aliases), choices, unit)


_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head")

FLAGS: tuple[Flag, ...] = (
    _flag("model_path", "text", "--model"),
    _flag("tp_size", "int", "--tensor-parallel-size", "--tp"),
    _flag("pp_size", "int", "--pipeline-parallel-size", "--pp"),
    _flag("dp_size", "int", "--data-parallel-size", "--dp"),
    _flag("nnodes", "int"),
    _flag("enable_dp_attention", "switch"),
    _flag("device", "text"),
    _flag("dtype", "text"),
    _flag("kv_cache_dtype", "text"),
    _flag("context_length", "count"),
    _flag("page_size", "int"),
    _flag("mem_fraction_static", "float"),
    _flag("max_total_tokens", "count"),
    _flag("max_running_requests", "int"),
    _flag("chunked_prefill_size", "int"),
    _flag("cuda_graph_max_bs", "int"),
    _flag("disable_cuda_graph", "switch"),
    _flag("disable_radix_cache", "switch"),
    _flag("swa_full_tokens_ratio", "float"),
    _flag("disable_hybrid_swa_memory", "switch"),
    _flag("mamba_full_memory_ratio", "float"),
    _flag("max_mamba_cache_size", "int"),
    _flag("mamba_ssm_dtype", "text"),
    _flag("speculative_algorithm", "text"),
    _flag("disaggregation_mode", "text", choices=("null", "prefill", "decode")),
    _flag("enable_hierarchical_cache", "switch", "--enable-hicache"),
    _flag("hicache_size", "int", unit="decimal GB, per rank"),
    _flag("hicache_ratio", "float"),
    _flag("hicache_host_memory_fraction", "float"),
    _flag("hicache_host_memory_mode", "text", choices=("cache", "buffer_only")),
    _flag("hicache_write_policy", "text", choices=("write_back", "write_through", "write_through_selective")),
    _flag("hicache_io_backend", "text", choices=("direct", "kernel", "kernel_ascend")),
    _flag("hicache_mem_layout", "text", choices=_LAYOUTS),
    _flag("hicache_storage_backend", "text"),
    _flag("enable_lmcache", "switch"),
    _flag("enable_linker_mla_dedup", "switch"),
    _flag("enable_unified_cache_external_linker", "switch"),
    _flag("unified_cache_external_linker_backend", "text"),
)

_BY_DEST = {item.dest: item for item in FLAGS}


def flag(dest: str) -> Flag:
    """The flag that sets ``dest``."""
    return _BY_DEST[dest]
