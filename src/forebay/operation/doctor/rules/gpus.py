"""The GPU itself: held by others, too small, unlike its neighbours, or measured while somebody let go."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import ranks_of, say, utilization_that_fits
from forebay.operation.doctor.rule import Found, Rule, pattern
from forebay.operation.doctor.rules.device_memory import OOM, TRIED, WEIGHTS
from forebay.servers.log_patterns import Stage

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)


def _busy_fix(found: Found) -> str:
    free, total, fraction = found.number("free") or 0.0, found.number("total") or 0.0, found.number("fraction")
    fits = utilization_that_fits(free, total)
    asked = f"{fraction:g} was asked for" if fraction else "more was asked for"
    if fits >= 0.3:
        held = total - free
        return (
            f"set --gpu-memory-utilization {fits:g} or less ({free:g} of {total:g} GiB is free; {asked}), or free the {held:.1f} GiB "
            "that others hold: `nvidia-smi`, `forebay status`"
        )
    return f"free the GPU: {total - free:.1f} of {total:g} GiB is held by another process or an orphan of an earlier run (`nvidia-smi`, `forebay down`)"


def _oom_is_other_process(found: Found) -> bool:
    """torch's message shows that less than half of what is used is its own."""
    total, free = found.number("total"), found.number("free")
    own = pattern(
        r"this process has (?P<own>[\d.]+) GiB memory in use|(?P<alloc>[\d.]+) GiB is allocated by PyTorch"
    ).search(found.line.text)
    if not total or free is None or own is None:
        return False
    free_gib = free / 1024 if found.text("free_unit") == "MiB" else free
    mine = float(own["own"] or own["alloc"])
    return total - free_gib - mine > 0.4 * total


def _loading(found: Found) -> bool:
    """The stack is in the loader, or nothing after the loading stage was reached."""
    block = found.transcript.block_of(found.index)
    stage = found.transcript.stages.get(found.source)
    return found.transcript.search(WEIGHTS, block) is not None or stage is Stage.LOADING


def _small_gpu_fix(found: Found) -> str:
    return (
        f"the weights do not fit this GPU: use more ranks (tensor parallel {2 * ranks_of(found)}), a smaller quantization, or a "
        "larger GPU; `forebay plan` computes the weights per rank"
    )


RULES = (
    Rule(
        "gpu_busy_vllm",
        Cause.GPU_BUSY,
        pattern(
            r"Free memory on device\s?\S* \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than (?:desired GPU memory utilization|the engine's budget)"
            r"(?:.*?\((?P<fraction>[\d.]+), (?P<asked>[\d.]+) GiB\))?"
        ),
        "{free} of {total} GiB is free on the GPU before the start: somebody else holds the rest.",
        _busy_fix,
        servers=VLLM,
        rules_out=((Cause.GPU_TOO_SMALL, "it failed before any weight was loaded"),),
        cases=("vllm-project_vllm-omni_276", "vllm-project_vllm_23192", "index_68853561374_gmu"),
    ),
    Rule(
        "gpu_busy_oom",
        Cause.GPU_BUSY,
        pattern(OOM + TRIED),
        "Out of GPU memory, most of which another process holds.",
        lambda found: (
            f"free the GPU first: of {found.text('total')} GiB only {found.text('free')} {found.text('free_unit')} was free, and this process holds the smaller part (`nvidia-smi`)"
        ),
        check=_oom_is_other_process,
    ),
    Rule(
        "gpu_busy_external",
        Cause.BUDGET_OVERRUN,
        pattern(r"Externally held weights on device .* exceed the desired GPU memory utilization"),
        "What is already on the GPU is more than the whole memory budget.",
        say("raise --gpu-memory-utilization above the share that is already held"),
        servers=VLLM,
    ),
    Rule(
        "gpu_unbalanced",
        Cause.GPU_UNBALANCED,
        pattern(
            r"[Tt]he memory capacity is unbalanced(?:.*?pre_model_load_memory=(?P<least>[\d.]+), local_gpu_memory=(?P<local>[\d.]+))?"
        ),
        "One rank's GPU has less free memory than the others: another process sits there, or an earlier model of this run already does.",
        say(
            "free the fuller GPU (`nvidia-smi`); where a draft model starts after the target, the check is a false alarm: set "
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0"
        ),
        servers=SGLANG,
        cases=("sgl-project_sglang_4233",),
    ),
    Rule(
        "profiling_race",
        Cause.PROFILING_RACE,
        pattern(
            r"Error in memory profiling\.(?: Initial free memory (?P<before>[\d.]+)(?: GiB)?, current free memory (?P<after>[\d.]+))?"
        ),
        "While vLLM measured its own use, another process freed GPU memory ({before} GiB free before, {after} after), so the measure is void.",
        say("start one server at a time on a GPU, or wait until the other has ended; then start again"),
        servers=VLLM,
    ),
    Rule(
        "weights_oom",
        Cause.GPU_TOO_SMALL,
        pattern(OOM + TRIED),
        "Out of GPU memory while the weights were loaded.",
        _small_gpu_fix,
        check=_loading,
    ),
)
