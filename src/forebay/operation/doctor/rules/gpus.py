"""The GPU itself: held by others, too small, unlike its neighbours, or measured while somebody let go."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.activities import ProcessActivity
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import say, utilization_that_fits
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Rule

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)


def _busy_fix(found: EventMatch) -> str:
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


def _oom_is_other_process(found: EventMatch) -> bool:
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


def _small_gpu_fix(found: EventMatch) -> str:
    ranks = found.base.launch.number("tp_size")
    more = f" (tensor parallel {2 * ranks})" if ranks else ""
    return (
        f"the weights do not fit this GPU: use more ranks{more}, a smaller quantization, or a larger GPU; `forebay plan MODEL` computes "
        "the weights per rank"
    )


RULES = (
    Rule(
        "gpu_busy_vllm",
        Cause.GPU_BUSY,
        "gpu_busy_vllm",
        "{free} of {total} GiB is free on the GPU before the start: somebody else holds the rest.",
        _busy_fix,
        servers=VLLM,
        rules_out=((Cause.GPU_TOO_SMALL, "it failed before any weight was loaded"),),
        cases=("vllm-project_vllm-omni_276", "vllm-project_vllm_23192", "index_68853561374_gmu"),
    ),
    Rule(
        "gpu_busy_oom",
        Cause.GPU_BUSY,
        "device_oom",
        "Out of GPU memory, most of which another process holds.",
        lambda found: (
            f"free the GPU first: of {found.text('total')} GiB only {found.text('free')} {found.text('free_unit')} was free, and this process holds the smaller part (`nvidia-smi`)"
        ),
        check=_oom_is_other_process,
    ),
    Rule(
        "gpu_busy_external",
        Cause.BUDGET_OVERRUN,
        "gpu_busy_external",
        "What is already on the GPU is more than the whole memory budget.",
        say("raise --gpu-memory-utilization above the share that is already held"),
        servers=VLLM,
    ),
    Rule(
        "gpu_unbalanced",
        Cause.GPU_UNBALANCED,
        "gpu_unbalanced",
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
        "profiling_race",
        "While vLLM measured its own use, another process freed GPU memory ({before} GiB free before, {after} after), so the measure is void.",
        say("start one server at a time on a GPU, or wait until the other has ended; then start again"),
        servers=VLLM,
    ),
    Rule(
        "weights_oom",
        Cause.GPU_TOO_SMALL,
        "device_oom",
        "Out of GPU memory while the weights were loaded.",
        _small_gpu_fix,
        activities=(ProcessActivity.WEIGHTS,),
        confidence=Confidence.LIKELY,
    ),
)
