"""The engine itself: toolchains, backends, hangs, crashes, kills, and what only says that something else failed."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import floor_to, say
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.rule import Priority, Requirement, Rule

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)

_NOT_OOM = (Requirement("device_oom_named", "block"),)


def _toolchain_fix(found: EventMatch) -> str:
    stray = found.base.transcript.search(pattern(r"(?:^|\s):/\S*/bin/nvcc"))
    if stray is not None:
        return "CUDA_HOME begins with a stray colon: export CUDA_HOME=/usr/local/cuda (one path), then start again"
    return (
        "install what compiles at run time (nvcc of the torch's CUDA version, ninja, g++) and set CUDA_HOME, or use an image of kind "
        "`devel`; without it: VLLM_USE_FLASHINFER_SAMPLER=0 (vLLM), --sampling-backend pytorch and --attention-backend triton (SGLang)"
    )


def _sampler_jit(found: EventMatch) -> bool:
    """The stack stops inside FlashInfer's sampler while the engine profiles: its kernel is compiled there."""
    block = found.base.transcript.block_of(found.index)
    names = (r"profile_run|_dummy_sampler_run|determine_available_memory",)
    return all(found.base.transcript.search(pattern(name), block) is not None for name in names)


def _ready_fix(found: EventMatch) -> str:
    waited = found.number("waited")
    value = int(floor_to((waited or 600) * 3, 60))
    return f"export VLLM_ENGINE_READY_TIMEOUT_S={value}: loading took longer than {int(waited or 600)} s; faster storage for the weights helps more"


def _worker_vanished(found: EventMatch) -> bool:
    """No worker said anything of its own failure, and none is quoted: it was killed from outside."""
    if found.base.transcript.search(pattern(r"Worker failed with error "), range(found.index)) is not None:
        return False
    return not any(
        entry.error
        and entry.line.process == "worker"
        and "Parent process exited" not in entry.line.text
        and "Broken pipe" not in entry.line.text
        and "BrokenPipe" not in entry.line.text
        for entry in found.base.transcript.entries[: found.index]
    )


def _engine_vanished(found: EventMatch) -> bool:
    """The engine wrote lines, none of them of an error: it was killed from outside."""
    engine = [entry for entry in found.base.transcript.entries if entry.line.process == "engine"]
    failing = any(entry.error for entry in engine if "[shutdown]" not in entry.line.text)
    return bool(engine) and not failing and _worker_vanished(found)


_KILLED_FIX = say(
    "find out who killed it: `dmesg -T | grep -i -e oom -e killed` and memory.events of the cgroup for the kernel; else a supervisor or a "
    "person. Exit codes alone do not tell"
)

RULES = (
    Rule(
        "embedded_code",
        Cause.UNKNOWN,  # the line names the cause itself; see choose.py
        "embedded_code",
        "The server named the cause itself: {reason}",
        lambda found: _embedded_fix(found),
        servers=("embedded",),
    ),
    Rule(
        "embedded_usage",
        Cause.BAD_FLAG,
        "embedded_usage",
        "The command line was refused: {what}",
        lambda found: f"correct it: {found.text('what') or found.text('why')}",
        servers=("embedded",),
    ),
    Rule(
        "ninja",
        Cause.JIT_TOOLCHAIN_MISSING,
        "ninja",
        "A kernel is compiled when the server starts, and the compiler is missing or mis-set.",
        _toolchain_fix,
        rules_out=((Cause.ENGINE_BUG, "the code is generated; the build failed"),),
        cases=("vllm-project_vllm_36077",),
    ),
    Rule(
        "sampler_jit",
        Cause.JIT_TOOLCHAIN_MISSING,
        "sampler_jit",
        "FlashInfer's sampler is compiled in the profiling run, and needs nvcc.",
        _toolchain_fix,
        servers=VLLM,
        check=_sampler_jit,
        excludes=(Requirement("device_oom_or_fault", "block"),),
        cases=("vllm-project_vllm_49497",),
    ),
    Rule(
        "driver",
        Cause.CUDA_DRIVER_MISMATCH,
        "driver",
        "The driver, the GPU and the CUDA build of the server do not fit together (or no GPU is visible).",
        say(
            "`nvidia-smi` shows the highest CUDA version the driver runs: install a server built for it, or update the driver; in a container check --gpus all / the device plugin"
        ),
    ),
    Rule(
        "torch_without_cuda",
        Cause.CUDA_DRIVER_MISMATCH,
        "torch_without_cuda",
        "This torch is a build without CUDA.",
        say("install the torch build that the server's release names (a +cuXXX wheel, not +cpu)"),
        priority=Priority.GENERAL,
    ),
    Rule(
        "attention_backend",
        Cause.ATTENTION_BACKEND_UNSUPPORTED,
        "attention_backend",
        "The attention backend cannot run this model on this GPU.",
        say(
            "choose another: SGLang --attention-backend triton (or fa3, flashinfer), vLLM --attention-backend TRITON_ATTN (VLLM_ATTENTION_BACKEND in older versions)"
        ),
        excludes=_NOT_OOM,
    ),
    Rule(
        "attention_in_capture",
        Cause.ATTENTION_BACKEND_UNSUPPORTED,
        "attention_in_capture",
        "The capture of graphs failed inside the attention backend, with memory to spare: the backend does not support this model's shape.",
        say("choose another attention backend (--attention-backend triton); --mem-fraction-static is not the matter"),
        servers=SGLANG,
        needs=(Requirement("attention_named", "block"),),
        excludes=_NOT_OOM,
        rules_out=((Cause.CUDAGRAPH_OOM, "memory was free when the capture began, and no allocation failed"),),
        cases=("sgl-project_sglang_1751",),
    ),
    Rule(
        "ready_timeout",
        Cause.ENGINE_READY_TIMEOUT,
        "ready_timeout",
        "The engine was still loading when the front's start-up deadline passed.",
        _ready_fix,
        servers=VLLM,
        priority=Priority.GENERAL,
        cases=("vllm-project_vllm_35616",),
    ),
    Rule(
        "execute_timeout",
        Cause.ENGINE_HUNG,
        "execute_timeout",
        "The engine stopped answering while it ran: its worker hung ({call}).",
        say(
            "look at the hung worker before ending it (`py-spy dump --pid PID`, state T is a stopped process); a long prefill needs VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS or --watchdog-timeout raised"
        ),
        cases=("vllm/fault_sigstop_worker_timeout",),
    ),
    Rule(
        "worker_died",
        Cause.WORKER_KILLED,
        "worker_died",
        "A worker process was killed from outside: it reported no error of its own.",
        _KILLED_FIX,
        priority=Priority.SECONDARY,
        check=_worker_vanished,
        cases=("vllm/fault_sigkill_worker",),
    ),
    Rule(
        "worker_lost_at_start",
        Cause.WORKER_KILLED,
        "worker_lost_at_start",
        "A worker process was killed while it started: it reported no error of its own.",
        _KILLED_FIX,
        priority=Priority.SECONDARY,
        servers=VLLM,
        check=lambda found: _worker_vanished(found) and _has_worker(found),
        cases=("vllm/fail_worker_killed_loading",),
    ),
    Rule(
        "engine_lost",
        Cause.WORKER_KILLED,
        "engine_lost",
        "The engine's process was killed from outside: it reported no error of its own.",
        _KILLED_FIX,
        priority=Priority.SECONDARY,
        servers=VLLM,
        check=_engine_vanished,
        cases=("vllm/fail_engine_killed_loading", "vllm/fault_sigkill_engine", "vllm/fault_sigkill_engine_keepalive"),
    ),
    Rule(
        "scheduler_crash_signal",
        Cause.ENGINE_BUG,
        "scheduler_crash_signal",
        "A process of the engine crashed in native code.",
        say(
            "update the server, or report the crash with this log; `Illegal instruction` means the build needs a newer CPU"
        ),
        priority=Priority.GENERAL,
    ),
    Rule(
        "scheduler_killed_serving",
        Cause.WORKER_KILLED,
        "scheduler_killed_serving",
        "A process of the server was killed from outside, and not by the kernel for want of memory.",
        _KILLED_FIX,
        priority=Priority.SECONDARY,
        check=lambda found: _killed_by_somebody(found),
        rules_out=(
            (
                Cause.HOST_OOM_KILLED,
                "no record of the kernel or the control group says so, and its pools were there long before",
            ),
        ),
    ),
    Rule(
        "cuda_fault",
        Cause.ENGINE_BUG,
        "cuda_fault",
        "A kernel failed on the GPU.",
        say(
            "start again with CUDA_LAUNCH_BLOCKING=1 to see the real place, try another attention backend, and update the server; Xid lines in the kernel log mean the hardware"
        ),
        priority=Priority.GENERAL,
    ),
    Rule(
        "assertion",
        Cause.ASSERTION,
        "assertion",
        "The server's own check failed: {what}",
        say("the line above the error names the check: it usually states the setting that breaks it"),
        priority=Priority.GENERAL,
    ),
    Rule(
        "bug",
        Cause.ENGINE_BUG,
        "bug",
        "The server's code failed ({type}: {what}).",
        say("update the server, or go back to the version that ran; report it with the traceback"),
        priority=Priority.GENERAL,
    ),
)


def _killed_by_somebody(found: EventMatch) -> bool:
    """Not the kernel: its records deny it, the signal is another one, or all memory had been taken before it served."""
    return found.base.observed.oom_denied or found.text("by") == "15" or found.base.transcript.has_served


def _has_worker(found: EventMatch) -> bool:
    return any(entry.line.process == "worker" for entry in found.base.transcript.entries[: found.index])


def _embedded_fix(found: EventMatch) -> str:
    match = pattern(r'\bfix="((?:[^"\\]|\\.)*)"|\bfix=(\S+)').search(found.line.text)
    if match:
        return match[1] or match[2]
    entries = found.base.transcript.entries
    after = entries[found.index + 1].line.text.strip() if found.index + 1 < len(entries) else ""
    return after.removeprefix("fix: ") if after.startswith("fix: ") else "see the cause's page"
