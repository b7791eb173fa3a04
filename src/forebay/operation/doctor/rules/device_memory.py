"""Device memory: weights, pools, graphs, activations."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import floor_to, ranks_of, say
from forebay.operation.doctor.rule import Found, Need, Priority, Rule, pattern
from forebay.servers.log_patterns import Stage

__all__ = ["OOM", "RULES", "TRIED", "WEIGHTS"]

SGLANG = ("sglang",)
VLLM = ("vllm",)
OOM = (
    r"(?:(?:CUDA|HIP|NPU|XPU|MUSA) out of memory|OutOfMemoryError|(?:CUDA|HIP) error: out of memory|"
    r"(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)|CUBLAS_STATUS_ALLOC_FAILED)"
)
TRIED = r"(?:.*?Tried to allocate (?P<tried>[\d.]+) (?P<unit>[KMG]iB))?(?:.*?total capacity of (?P<total>[\d.]+) GiB)?(?:.*?of which (?P<free>[\d.]+) (?P<free_unit>[KMG]iB) is free)?"
_CAPTURE = pattern(
    r"[Cc]aptur(?:e|ing)\b.*(?:[Gg]raph|batches|num tokens)|cuda_?graph|CudaGraph|cudagraph|capture_model|capture_one_batch",
    ignore_case=False,
)
_POOL = pattern(
    r"memory_pool\.py|_allocate_kv_cache|allocate_kv_cache|init_memory_pool|TokenToKVPool|_create_buffers|initialize_kv_cache|_allocate_gpu_cache|cache_engine\.py"
)
WEIGHTS = pattern(
    r"load_model|model_loader|weight_loader|weight_utils|initialize_model|create_weights|process_weights_after_loading|load_weights"
)
_WORKSPACE = pattern(
    r"workspace|deep_?ep\b.*[Bb]uffer|\bBuffer\(|aiter|symm_mem|custom_all_reduce|NVSHMEM|nvshmem", ignore_case=False
)
_MODEL_LEN = (
    r"To serve at least one request with the models?'s max(?:imum)? seq(?:uence)? len(?:gth)? \((?P<length>[\d,]+)\)"
    r"(?:, \(?(?P<needed>[\d.]+) ?GiB KV cache is needed)?(?:.*?available(?: KV cache memory)? ?\(?(?P<available>[\d.]+) ?GiB)?"
    r"(?:.*?estimated maximum model length is (?P<estimate>[\d,]+))?"
)


def _fraction_fix(found: Found) -> str:
    wanted = found.number("minimum") or found.number("above")
    current = found.number("current")
    if wanted is None:
        return "raise --mem-fraction-static in steps of 0.02, or use more ranks"
    value = floor_to(wanted + 0.02, 0.001)
    if wanted >= 0.97:
        return (
            f"the weights need more than {wanted:.4g} of each GPU: use more ranks (--tp-size {2 * ranks_of(found)}) or a smaller "
            "quantization; no fraction leaves room for the KV pool and graphs"
        )
    now = f" (now {current:g})" if current is not None else ""
    return f"set --mem-fraction-static {value:g} or a little more{now}: the weights alone take {wanted:.4g}; or use more ranks"


def _old_fraction_fix(found: Found) -> str:
    needed = _weights_fraction(found)
    if needed is not None:
        return f"the weights take {needed:.3f} of the memory that was free: set --mem-fraction-static {floor_to(needed + 0.03, 0.01):g}"
    return (
        "raise --mem-fraction-static by 0.01 to 0.03; where that ends in an out-of-memory error while graphs are captured, no value "
        "fits: use more ranks, a smaller draft model, --cuda-graph-max-bs 16, or a smaller quantization"
    )


def _weights_fraction(found: Found) -> float | None:
    """Share of the free memory that the weights took, from `Load weight begin/end … avail mem=, mem usage=`."""
    begin = end = None
    for entry in found.transcript.entries:
        text = entry.line.text
        match = pattern(
            r"^Load weight (?P<what>begin|end)\b.*avail mem=(?P<gb>[\d.]+) GB(?:, mem usage=(?P<used>[\d.]+))?"
        ).search(text)
        if match and match["what"] == "begin" and begin is None:
            begin = float(match["gb"])
        elif match and match["what"] == "end":
            end = float(match["gb"])
            if begin is None and match["used"]:  # the log's head is missing
                begin = end + float(match["used"])
    return 1 - end / begin if begin and end is not None else None


def _kv_length_fix(found: Found) -> str:
    estimated = found.number("estimate")
    needed, available, asked = found.number("needed"), found.number("available"), found.number("length")
    parts = []
    if estimated:
        parts.append(f"set --max-model-len {int(floor_to(estimated, 16)) or int(estimated)} or less")
    elif needed and available and asked:
        parts.append(f"set --max-model-len {int(floor_to(asked * available / needed, 16))} or less")
    else:
        parts.append("lower --max-model-len")
    if needed and available:
        parts.append(
            f"or free {needed - available:.2f} GiB more per rank for the KV cache (a larger memory utilization, more ranks, an fp8 KV cache)"
        )
    elif needed:
        parts.append(f"or give the KV cache at least {needed:g} GiB per rank")
    return ", ".join(parts)


def _capturing(found: Found) -> bool:
    """The stack, the message, or the stage is the capture of graphs."""
    block = found.transcript.block_of(found.index)
    stage = found.transcript.stages.get(found.source)
    return found.transcript.search(_CAPTURE, block) is not None or stage is Stage.CAPTURING


def _graph_fix(found: Found) -> str:
    fraction = found.transcript.asked.get("mem_fraction_static") or found.transcript.asked.get("gpu_memory_utilization")
    tried = found.text("tried")
    need = f"the capture asked for {tried} {found.text('unit')} more; " if tried else ""
    try:
        lower = f"{floor_to(float(fraction or '') - 0.05, 0.01):g}"
    except ValueError:
        lower = "0.05 lower"
    if found.transcript.server == "vllm":
        return (
            f"{need}set --gpu-memory-utilization {lower}, capture fewer sizes (--max-num-seqs), or use --enforce-eager"
        )
    return f"{need}set --mem-fraction-static {lower}, or capture fewer sizes: --cuda-graph-max-bs 16; graphs live outside the static pool"


def _runtime_fix(found: Found) -> str:
    if found.transcript.server == "vllm":
        return "lower --max-num-seqs and --max-num-batched-tokens, or --gpu-memory-utilization by 0.05"
    return "lower --mem-fraction-static by 0.05, --chunked-prefill-size to 2048, or --max-running-requests"


def _mamba_fix(found: Found) -> str:
    blocks = found.number("blocks")
    if blocks:
        return f"set --max-num-seqs {int(blocks)} or less, or give the KV cache more memory"
    return "lower --max-running-requests (or --max-num-seqs), or raise the memory fraction"


def _no_cache_fix(found: Found) -> str:
    fraction = found.transcript.asked.get("gpu_memory_utilization", "")
    now = f" (now {fraction})" if fraction else ""
    return f"weights and activations use up the budget: raise --gpu-memory-utilization{now}, use more ranks, lower --max-num-batched-tokens, or quantize"


def _hybrid_fix(found: Found) -> str:
    return (
        "the connector turned the hybrid KV manager off, so every layer is counted as full attention: use a connector that supports it, "
        "pass --no-disable-hybrid-kv-cache-manager where yours does, or drop --kv-transfer-config"
    )


def _capturing_block(found: Found) -> bool:
    return found.transcript.search(_CAPTURE, found.transcript.block_of(found.index)) is not None


RULES = (
    Rule(
        "sglang_weights",
        Cause.WEIGHTS_EXCEED_STATIC,
        pattern(
            r"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=(?P<current>[\d.]+)\."
            r"(?: Raise --mem-fraction-static above (?P<above>[\d.]+))?(?:.*minimum viable = [^=]*= (?P<minimum>[\d.]+?)\))?"
        ),
        "At --mem-fraction-static={current} the weights leave nothing for the KV cache.",
        _fraction_fix,
        servers=SGLANG,
        cases=("index_63141137595", "SemiAnalysisAI_InferenceX_2128", "sglang/fail_mem_fraction_0_0001"),
    ),
    Rule(
        "sglang_no_memory_weights",
        Cause.WEIGHTS_EXCEED_STATIC,
        pattern(r"Not enough memory\. Please try to increase --mem-fraction-static\b"),
        "The static fraction is below what the weights take.",
        _old_fraction_fix,
        servers=SGLANG,
        check=lambda found: (_weights_fraction(found) or 1.0) < 0.93,
    ),
    Rule(
        "sglang_no_window",
        Cause.NO_WINDOW,
        pattern(r"Not enough memory\. Please try to increase --mem-fraction-static\b"),
        "Weights fill the static fraction; a larger one leaves too little for graphs and activations, so the window between the two is "
        "empty or nearly so.",
        _old_fraction_fix,
        servers=SGLANG,
        check=lambda found: not (_weights_fraction(found) or 1.0) < 0.93,
        cases=("sgl-project_sglang_4330_084",),
    ),
    Rule(
        "sglang_swa_no_room",
        Cause.WEIGHTS_EXCEED_STATIC,
        pattern(r"leaves no room for the full KV pool|byte budget \d+ cannot fit ONE worst-case request"),
        "The memory left for the KV pools holds not one request.",
        _runtime_fix,
        servers=SGLANG,
    ),
    Rule(
        "vllm_no_cache_blocks",
        Cause.WEIGHTS_EXCEED_STATIC,
        pattern(r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory"),
        "Weights and activations leave nothing of the memory budget for the KV cache.",
        _no_cache_fix,
        servers=VLLM,
    ),
    Rule(
        "hma_disabled",
        Cause.HMA_DISABLED,
        pattern(_MODEL_LEN),
        "The hybrid KV manager is off, so all layers were sized as full attention: {needed} GiB for one request.",
        _hybrid_fix,
        servers=VLLM,
        needs=(
            Need(
                pattern(
                    r"(?:Turning off hybrid kv cache manager|Hybrid KV cache manager is disabled)", ignore_case=True
                )
            ),
        ),
        rules_out=((Cause.CTX_TOO_LONG_FOR_KV, "the length would fit with the hybrid manager on"),),
        cases=("vllm-project_vllm_41830",),
    ),
    Rule(
        "hma_required",
        Cause.HMA_DISABLED,
        pattern(
            r"(?:requires?|needs?) (?:the )?(?:HMA|[Hh]ybrid KV cache manager)|[Hh]ybrid KV cache manager (?:was explicitly enabled but is not|is not) supported|Hybrid KV cache manager is disabled but failed to convert"
        ),
        "The model needs the hybrid KV manager, and a setting turned it off.",
        _hybrid_fix,
        servers=VLLM,
    ),
    Rule(
        "vllm_length",
        Cause.CTX_TOO_LONG_FOR_KV,
        pattern(_MODEL_LEN),
        "One request of {length} tokens needs {needed} GiB of KV cache; {available} GiB is there.",
        _kv_length_fix,
        servers=VLLM,
        excludes=(
            Need(
                pattern(
                    r"(?:Turning off hybrid kv cache manager|Hybrid KV cache manager is disabled)", ignore_case=True
                )
            ),
        ),
        cases=(
            "index_325214489",
            "index_61370435018_fail",
            "index_68853561374_kv",
            "vllm/fail_kv_too_small_len",
            "vllm/fail_kv_too_small_bytes",
        ),
    ),
    Rule(
        "vllm_length_old",
        Cause.CTX_TOO_LONG_FOR_KV,
        pattern(
            r"[Tt]he model's max seq len \((?P<length>[\d,]+)\) is larger than the maximum number of tokens that can be stored in KV cache \((?P<estimate>[\d,]+)\)"
        ),
        "A request of {length} tokens does not fit the KV cache of {estimate} tokens.",
        _kv_length_fix,
        servers=VLLM,
    ),
    Rule(
        "mamba_vllm",
        Cause.MAMBA_BLOCKS,
        pattern(r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<blocks>\d+)\)"),
        "A hybrid model needs one state block per sequence: {asked} sequences asked for, {blocks} blocks there.",
        _mamba_fix,
        servers=VLLM,
    ),
    Rule(
        "mamba_sglang",
        Cause.MAMBA_BLOCKS,
        pattern(
            r"[Hh]ybrid \(mamba/linear-attention\) state cache is too small|Not enough GPU memory for hybrid \(mamba/linear-attention\) state cache|max_mamba_cache_size\b.*(?:too small|must be (?:greater|larger|positive))|[Mm]amba (?:state )?cache .*(?:too small|not enough)"
        ),
        "The state cache of the model's linear-attention layers holds no request.",
        _mamba_fix,
        servers=SGLANG,
    ),
    Rule(
        "graph_oom",
        Cause.CUDAGRAPH_OOM,
        pattern(OOM + TRIED),
        "Out of GPU memory while graphs were captured: they live outside the pool that was sized before.",
        _graph_fix,
        tier=Priority.SPECIFIC,
        check=_capturing,
        excludes=(Need(WEIGHTS, "block"),),
        cases=("sgl-project_sglang_5285",),
    ),
    Rule(
        "kv_undercounted",
        Cause.KV_UNDERCOUNTED,
        pattern(OOM + TRIED),
        "Out of GPU memory while the KV pool itself was allocated: the pool was sized from fewer bytes a token than it takes.",
        say(
            "cap the pool (SGLang --max-total-tokens, vLLM --kv-cache-memory-bytes) 5 % below what the log computed, or lower the memory fraction by 0.05"
        ),
        needs=(Need(_POOL, "block"),),
        check=lambda found: not _capturing_block(found),
    ),
    Rule(
        "workspace_overrun",
        Cause.BUDGET_OVERRUN,
        pattern(OOM + TRIED),
        "Out of GPU memory in a workspace that the memory budget does not count.",
        _runtime_fix,
        needs=(Need(_WORKSPACE, "block"),),
        check=lambda found: not _capturing_block(found),
    ),
    Rule(
        "runtime_oom",
        Cause.RUNTIME_OR_INIT_OOM,
        pattern(OOM + TRIED),
        "Out of GPU memory outside weights, pool and graphs: activations of a large batch, or an initialisation.",
        _runtime_fix,
        tier=Priority.GENERAL,
    ),
)
