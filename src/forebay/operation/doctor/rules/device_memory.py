"""Device memory: weights, pools, graphs, activations."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.activities import ProcessActivity
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import by_server, floor_to
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Priority, Requirement, Rule

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)


def _fraction_fix(found: EventMatch) -> str:
    wanted = found.number("minimum") or found.number("above")
    current = found.number("current")
    ranks = found.base.launch.number("tp_size")
    if wanted is None:
        return "raise --mem-fraction-static in steps of 0.02, or use more ranks"
    value = floor_to(wanted + 0.02, 0.001)
    if wanted >= 0.97:
        return (
            f"the weights need more than {wanted:.4g} of each GPU: use more ranks{f' (--tp-size {2 * ranks})' if ranks else ''} or a smaller "
            "quantization; no fraction leaves room for the KV pool and graphs"
        )
    now = f" (now {current:g})" if current is not None else ""
    return f"set --mem-fraction-static {value:g} or a little more{now}: the weights alone take {wanted:.4g}; or use more ranks"


def _old_fraction_fix(found: EventMatch) -> str:
    needed = _weights_fraction(found)
    if needed is not None:
        return f"the weights take {needed:.3f} of the memory that was free: set --mem-fraction-static {floor_to(needed + 0.03, 0.01):g}"
    return (
        "raise --mem-fraction-static by 0.01 to 0.03; where that ends in an out-of-memory error while graphs are captured, no value "
        "fits: use more ranks, a smaller draft model, --cuda-graph-max-bs 16, or a smaller quantization"
    )


def _weights_fraction(found: EventMatch) -> float | None:
    """Share of the free memory that the weights took, from `Load weight begin/end … avail mem=, mem usage=`."""
    begin = end = None
    for entry in found.base.transcript.entries:
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


def _kv_length_fix(found: EventMatch) -> str:
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


def _graph_fix(found: EventMatch) -> str:
    tried = found.text("tried")
    need = f"the capture asked for {tried} {found.text('unit')} more; " if tried else ""
    if found.base.server == "vllm":
        return (
            f"{need}lower --gpu-memory-utilization{_less(found, 'gpu_memory_utilization')}, capture fewer sizes (--max-num-seqs), "
            "or use --enforce-eager"
        )
    if found.base.server == "sglang":
        return (
            f"{need}lower --mem-fraction-static{_less(found, 'mem_fraction_static')}, or capture fewer sizes (--cuda-graph-max-bs 16): "
            "graphs live outside the static pool"
        )
    return f"{need}make the KV pool smaller, or capture fewer graphs"


def _less(found: EventMatch, flag: str) -> str:
    """`` from 0.9 to 0.85`` where the log says what was asked for, else `` by 0.05``."""
    now = found.base.launch.decimal(flag)
    return f" from {now:g} to {floor_to(now - 0.05, 0.01):g}" if now and 0.1 < now <= 1 else " by 0.05"


def _runtime_fix(found: EventMatch) -> str:
    if found.base.server == "vllm":
        less = _less(found, "gpu_memory_utilization")
        return f"lower --max-num-seqs and --max-num-batched-tokens, or --gpu-memory-utilization{less}"
    if found.base.server == "sglang":
        less = _less(found, "mem_fraction_static")
        return f"lower --mem-fraction-static{less}, --chunked-prefill-size to 2048, or --max-running-requests"
    return "make the KV pool smaller, or run fewer and smaller batches"


def _mamba_fix(found: EventMatch) -> str:
    blocks = found.number("blocks")
    if blocks:
        return f"set --max-num-seqs {int(blocks)} or less, or give the KV cache more memory"
    return "lower --max-running-requests (or --max-num-seqs), or raise the memory fraction"


def _no_cache_fix(found: EventMatch) -> str:
    fraction = found.base.launch.asked.get("gpu_memory_utilization", "")
    now = f" (now {fraction})" if fraction else ""
    return f"weights and activations use up the budget: raise --gpu-memory-utilization{now}, use more ranks, lower --max-num-batched-tokens, or quantize"


def _hybrid_fix(found: EventMatch) -> str:
    return (
        "the connector turned the hybrid KV manager off, so every layer is counted as full attention: use a connector that supports it, "
        "pass --no-disable-hybrid-kv-cache-manager where yours does, or drop --kv-transfer-config"
    )


RULES = (
    Rule(
        "sglang_weights",
        Cause.WEIGHTS_EXCEED_STATIC,
        "sglang_weights",
        "At --mem-fraction-static={current} the weights leave nothing for the KV cache.",
        _fraction_fix,
        servers=SGLANG,
        cases=("index_63141137595", "SemiAnalysisAI_InferenceX_2128", "sglang/fail_mem_fraction_0_0001"),
    ),
    Rule(
        "sglang_no_memory_weights",
        Cause.WEIGHTS_EXCEED_STATIC,
        "sglang_static_memory_short",
        "The static fraction is below what the weights take.",
        _old_fraction_fix,
        servers=SGLANG,
        check=lambda found: (_weights_fraction(found) or 1.0) < 0.93,
    ),
    Rule(
        "sglang_no_window",
        Cause.NO_WINDOW,
        "sglang_static_memory_short",
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
        "sglang_swa_no_room",
        "The memory left for the KV pools holds not one request.",
        _runtime_fix,
        servers=SGLANG,
    ),
    Rule(
        "vllm_no_cache_blocks",
        Cause.WEIGHTS_EXCEED_STATIC,
        "vllm_no_cache_blocks",
        "Weights and activations leave nothing of the memory budget for the KV cache.",
        _no_cache_fix,
        servers=VLLM,
    ),
    Rule(
        "hma_disabled",
        Cause.HMA_DISABLED,
        "kv_cache_below_one_request",
        "The hybrid KV manager is off, so all layers were sized as full attention: {needed} GiB for one request.",
        _hybrid_fix,
        servers=VLLM,
        needs=(Requirement("hybrid_manager_off"),),
        rules_out=((Cause.CTX_TOO_LONG_FOR_KV, "the length would fit with the hybrid manager on"),),
        cases=("vllm-project_vllm_41830",),
    ),
    Rule(
        "hma_required",
        Cause.HMA_DISABLED,
        "hma_required",
        "The model needs the hybrid KV manager, and a setting turned it off.",
        _hybrid_fix,
        servers=VLLM,
    ),
    Rule(
        "vllm_length",
        Cause.CTX_TOO_LONG_FOR_KV,
        "kv_cache_below_one_request",
        "One request of {length} tokens needs {needed} GiB of KV cache; {available} GiB is there.",
        _kv_length_fix,
        servers=VLLM,
        excludes=(Requirement("hybrid_manager_off"),),
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
        "vllm_length_old",
        "A request of {length} tokens does not fit the KV cache of {estimate} tokens.",
        _kv_length_fix,
        servers=VLLM,
    ),
    Rule(
        "mamba_vllm",
        Cause.MAMBA_BLOCKS,
        "mamba_vllm",
        "A hybrid model needs one state block per sequence: {asked} sequences asked for, {blocks} blocks there.",
        _mamba_fix,
        servers=VLLM,
    ),
    Rule(
        "mamba_sglang",
        Cause.MAMBA_BLOCKS,
        "mamba_sglang",
        "The state cache of the model's linear-attention layers holds no request.",
        _mamba_fix,
        servers=SGLANG,
    ),
    Rule(
        "graph_oom",
        Cause.CUDAGRAPH_OOM,
        "device_oom",
        "Out of GPU memory while graphs were captured: they live outside the pool that was sized before.",
        _graph_fix,
        activities=(ProcessActivity.CAPTURE,),
        cases=("sgl-project_sglang_5285",),
    ),
    Rule(
        "kv_undercounted",
        Cause.KV_UNDERCOUNTED,
        "device_oom",
        "Out of GPU memory while the KV pool itself was allocated: the pool was sized from fewer bytes per token than it takes.",
        by_server(
            sglang="cap the pool with --max-total-tokens 5 % below what the log computed, or lower --mem-fraction-static by 0.05",
            vllm="cap the pool with --kv-cache-memory-bytes 5 % below what the log computed, or lower --gpu-memory-utilization by 0.05",
            words="make the KV pool 5 % smaller than what the server computed",
        ),
        activities=(ProcessActivity.DEVICE_POOL,),
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "workspace_overrun",
        Cause.BUDGET_OVERRUN,
        "device_oom",
        "Out of GPU memory in a workspace that the memory budget does not count.",
        _runtime_fix,
        activities=(ProcessActivity.WORKSPACE,),
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "runtime_oom",
        Cause.RUNTIME_OR_INIT_OOM,
        "device_oom",
        "Out of GPU memory outside weights, pool and graphs: activations of a large batch, or an initialisation.",
        _runtime_fix,
        priority=Priority.GENERAL,
    ),
)
