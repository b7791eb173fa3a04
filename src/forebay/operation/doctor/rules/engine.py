"""The engine itself: toolchains, backends, hangs, crashes, kills, and what only says that something else failed."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import floor_to, say
from forebay.operation.doctor.rule import Found, Need, Priority, Rule, Where, pattern
from forebay.operation.doctor.rules.device_memory import OOM

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)

_NOT_OOM = (Need(pattern(OOM), "block"),)


def _toolchain_fix(found: Found) -> str:
    stray = found.transcript.search(pattern(r"(?:^|\s):/\S*/bin/nvcc"))
    if stray is not None:
        return "CUDA_HOME begins with a stray colon: export CUDA_HOME=/usr/local/cuda (one path), then start again"
    return (
        "install what compiles at run time (nvcc of the torch's CUDA version, ninja, g++) and set CUDA_HOME, or use an image of kind "
        "`devel`; without it: VLLM_USE_FLASHINFER_SAMPLER=0 (vLLM), --sampling-backend pytorch and --attention-backend triton (SGLang)"
    )


def _sampler_jit(found: Found) -> bool:
    """The stack stops inside FlashInfer's sampler while the engine profiles: its kernel is compiled there."""
    block = found.transcript.block_of(found.index)
    names = (r"profile_run|_dummy_sampler_run|determine_available_memory",)
    return all(found.transcript.search(pattern(name), block) is not None for name in names)


def _ready_fix(found: Found) -> str:
    waited = found.number("waited")
    value = int(floor_to((waited or 600) * 3, 60))
    return f"export VLLM_ENGINE_READY_TIMEOUT_S={value}: loading took longer than {int(waited or 600)} s; faster storage for the weights helps more"


def _worker_vanished(found: Found) -> bool:
    """No worker said anything of its own failure, and none is quoted: it was killed from outside."""
    if found.transcript.search(pattern(r"Worker failed with error "), range(found.index)) is not None:
        return False
    return not any(
        entry.error
        and entry.line.process == "worker"
        and "Parent process exited" not in entry.line.text
        and "Broken pipe" not in entry.line.text
        and "BrokenPipe" not in entry.line.text
        for entry in found.transcript.entries[: found.index]
    )


def _engine_vanished(found: Found) -> bool:
    """The engine wrote lines, none of them of an error: it was killed from outside."""
    engine = [entry for entry in found.transcript.entries if entry.line.process == "engine"]
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
        pattern(
            r"^(?:died|refused)\b.*?\bcode=\"?(?P<code>[a-z_]+)\"?(?=\s|$)(?:.*?\breason=\"(?P<reason>(?:[^\"\\]|\\.)*)\")?|"
            r"^forebay: (?P<reason2>.+) \[(?P<code2>[a-z_]+)\]$"
        ),
        "The server named the cause itself: {reason}",
        lambda found: _embedded_fix(found),
        servers=("embedded",),
    ),
    Rule(
        "embedded_usage",
        Cause.BAD_FLAG,
        pattern(
            r"^Error: (?P<what>(?:No such option|Invalid value|Missing|Got unexpected|Option).*)|"
            r"^refused (?!.*\bcode=).*\breason=\"?(?P<why>[^\"]+)"
        ),
        "The command line was refused: {what}",
        lambda found: f"correct it: {found.text('what') or found.text('why')}",
        servers=("embedded",),
    ),
    Rule(
        "ninja",
        Cause.JIT_TOOLCHAIN_MISSING,
        pattern(
            r"Ninja build failed|[Nn]inja is required|Error building extension|(?:Could not|Failed to) (?:find|locate) nvcc|nvcc(?:['\"`]| was)? not found|(?:Unable to find|No) .*\bnvcc\b|/nvcc: (?:not found|No such file)|No such file or directory: '[^']*(?:nvcc|ninja|g\+\+|gcc|cc1plus)'|"
            r"CUDA_HOME (?:environment variable is not set|is not set)|Failed to find C compiler|InvalidCxxCompiler|No working C\+\+ compiler|(?:g\+\+|gcc|cc1plus|c\+\+)\b.{0,40}(?:not found|No such file)|fatal error: (?:Python|cuda\w*|\w+)\.h: No such file|"
            r"nvcc fatal|Please specify via CC environment variable|CppCompileError|RuntimeError: .*(?:NVCC|nvcc) (?:compilation|version).{0,30}(?:fail|too old|required)"
        ),
        "A kernel is compiled when the server starts, and the compiler is missing or mis-set.",
        _toolchain_fix,
        rules_out=((Cause.ENGINE_BUG, "the code is generated; the build failed"),),
        cases=("vllm-project_vllm_36077",),
    ),
    Rule(
        "sampler_jit",
        Cause.JIT_TOOLCHAIN_MISSING,
        pattern(r"File \".*\", line \d+, in flashinfer_sample\b"),
        "FlashInfer's sampler is compiled in the profiling run, and needs nvcc.",
        _toolchain_fix,
        servers=VLLM,
        where=Where.STACK,
        check=_sampler_jit,
        excludes=(Need(pattern(OOM + r"|illegal memory access|no kernel image"), "block"),),
        cases=("vllm-project_vllm_49497",),
    ),
    Rule(
        "driver",
        Cause.CUDA_DRIVER_MISMATCH,
        pattern(
            r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|no kernel image is available for execution|device kernel image is invalid|unsupported display driver / cuda driver combination|"
            r"forward compatibility was attempted on non supported HW|Driver/library version mismatch|provided PTX was compiled with an unsupported toolchain|libcuda\.so\S*: cannot open shared object|"
            r"Found no NVIDIA driver|No CUDA GPUs are available|CUDA error: (?:system not yet initialized|unknown error - this may be due to an incorrectly set up environment)|CUDA initialization:.*(?:Error|fail)|"
            r"Failed to infer device type|nvidia-container-cli: .*(?:initialization error|driver|requirement error)|unsatisfied condition: cuda|is not compatible with the current PyTorch installation|hipErrorNoBinaryForGpu"
        ),
        "The driver, the GPU and the CUDA build of the server do not fit together (or no GPU is visible).",
        say(
            "`nvidia-smi` shows the highest CUDA version the driver runs: install a server built for it, or update the driver; in a container check --gpus all / the device plugin"
        ),
    ),
    Rule(
        "torch_without_cuda",
        Cause.CUDA_DRIVER_MISMATCH,
        pattern(r"Torch not compiled with CUDA enabled"),
        "This torch is a build without CUDA.",
        say("install the torch build that the server's release names (a +cuXXX wheel, not +cpu)"),
        tier=Priority.GENERAL,
    ),
    Rule(
        "attention_backend",
        Cause.ATTENTION_BACKEND_UNSUPPORTED,
        pattern(
            r"No valid attention backend|[Ss]elected backend .* is not valid for this configuration|(?:[Hh]ead[_ ]size|[Hh]ead[_ ]dim\w*) (?P<dim>\d+) is not supported|head_dim=?\s?(?P<dim2>\d+).{0,40}not supported|"
            r"FlashAttention(?:[- ]?\d)? only supports|FlashAttention v?3 Backend requires|(?:[Aa]ttention|MLA) [Bb]ackend\S* .{0,80}(?:is not supported|not supported|requires SM|does not support)|(?:FlashMLA|FlashInfer|[Ff]lash_attn|TRTLLM|trtllm_mla|cutlass_mla|fa3)\b.{0,60}(?:is not supported on|not supported|does not support|requires)|Unsupported head_dim|Unsupported attention backend"
        ),
        "The attention backend cannot run this model on this GPU.",
        say(
            "choose another: SGLang --attention-backend triton (or fa3, flashinfer), vLLM --attention-backend TRITON_ATTN (VLLM_ATTENTION_BACKEND in older versions)"
        ),
        excludes=_NOT_OOM,
    ),
    Rule(
        "attention_in_capture",
        Cause.ATTENTION_BACKEND_UNSUPPORTED,
        pattern(r"(?:Exception: )?Capture cuda graph failed(?!.*out of memory)"),
        "The capture of graphs failed inside the attention backend, with memory to spare: the backend does not support this model's shape.",
        say("choose another attention backend (--attention-backend triton); --mem-fraction-static is not the matter"),
        servers=SGLANG,
        needs=(Need(pattern(r"flashinfer|begin_forward|attention_backend|_attn|attention/"), "block"),),
        excludes=_NOT_OOM,
        rules_out=((Cause.CUDAGRAPH_OOM, "memory was free when the capture began, and no allocation failed"),),
        cases=("sgl-project_sglang_1751",),
    ),
    Rule(
        "ready_timeout",
        Cause.ENGINE_READY_TIMEOUT,
        pattern(
            r"Timed out waiting for (?:new )?(?:engines? to send initial message|engine core processes to start)(?:.*?Waited (?P<waited>\d+)s)?|Did not receive response from front-end process within"
        ),
        "The engine was still loading when the front's start-up deadline passed.",
        _ready_fix,
        servers=VLLM,
        tier=Priority.GENERAL,
        cases=("vllm-project_vllm_35616",),
    ),
    Rule(
        "execute_timeout",
        Cause.ENGINE_HUNG,
        pattern(
            r"RPC call to (?P<call>\w+) timed out|[Ww]atchdog (?:caught collective operation )?[Tt]imeout\b(?!.*self\.soft=True)|[Ee]ngine (?:is|appears) (?:hung|stuck|unresponsive)"
        ),
        "The engine stopped answering while it ran: its worker hung ({call}).",
        say(
            "look at the hung worker before ending it (`py-spy dump --pid PID`, state T is a stopped process); a long prefill needs VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS or --watchdog-timeout raised"
        ),
        where=Where.ANY,
        cases=("vllm/fault_sigstop_worker_timeout",),
    ),
    Rule(
        "worker_died",
        Cause.WORKER_KILLED,
        pattern(
            r"(?:Ray)?Worker ?[Pp]roc (?P<who>\S+) died unexpectedly|RayWorkerProc rank=\d+ died unexpectedly|Worker (?P<who2>\S+) pid \d+ died, exit code: -(?:9|15)\b"
        ),
        "A worker process was killed from outside: it reported no error of its own.",
        _KILLED_FIX,
        tier=Priority.FALLOUT,
        check=_worker_vanished,
        cases=("vllm/fault_sigkill_worker",),
    ),
    Rule(
        "worker_lost_at_start",
        Cause.WORKER_KILLED,
        pattern(r"WorkerProc initialization failed due to an exception in a background process"),
        "A worker process was killed while it started: it reported no error of its own.",
        _KILLED_FIX,
        tier=Priority.FALLOUT,
        servers=VLLM,
        check=lambda found: _worker_vanished(found) and _has_worker(found),
        cases=("vllm/fail_worker_killed_loading",),
    ),
    Rule(
        "engine_lost",
        Cause.WORKER_KILLED,
        pattern(
            r"engine core exited unexpectedly|Engine core initialization failed\..*Failed core proc\(s\): \{\}|Engine core proc (?P<who>\S+) died unexpectedly"
        ),
        "The engine's process was killed from outside: it reported no error of its own.",
        _KILLED_FIX,
        tier=Priority.FALLOUT,
        where=Where.ANY,
        servers=VLLM,
        check=_engine_vanished,
        cases=("vllm/fail_engine_killed_loading", "vllm/fault_sigkill_engine", "vllm/fault_sigkill_engine_keepalive"),
    ),
    Rule(
        "scheduler_crash_signal",
        Cause.ENGINE_BUG,
        pattern(
            r"(?:exit ?code:? |signal )-?(?:11|6|7|8|4)\b|Segmentation fault|SIGSEGV|SIGABRT|Aborted \(core dumped\)|Floating point exception|Illegal instruction|Fatal Python error: (?!Bus error)(?P<what>.+)|double free or corruption|malloc\(\): "
        ),
        "A process of the engine crashed in native code.",
        say(
            "update the server, or report the crash with this log; `Illegal instruction` means the build needs a newer CPU"
        ),
        tier=Priority.GENERAL,
    ),
    Rule(
        "scheduler_killed_serving",
        Cause.WORKER_KILLED,
        pattern(
            r"Subprocess (?P<who>\S+) \(pid=\d+\) crashed with exit code -(?P<by>9|15)\b|scheduler (?:died|is dead)\b.*exit ?code: -(?P<by2>9|15)\b|"
            r"Failed core proc\(s\): \{[^}]*: -(?P<by3>9|15)\b"
        ),
        "A process of the server was killed from outside, and not by the kernel for want of memory.",
        _KILLED_FIX,
        tier=Priority.FALLOUT,
        where=Where.ANY,
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
        pattern(
            r"illegal memory access|device-side assert triggered|unspecified launch failure|misaligned address|CUDA error: (?:invalid configuration argument|an illegal instruction|invalid device function)|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_SUPPORTED)|HSA_STATUS_ERROR|Memory access fault by GPU"
        ),
        "A kernel failed on the GPU.",
        say(
            "start again with CUDA_LAUNCH_BLOCKING=1 to see the real place, try another attention backend, and update the server; Xid lines in the kernel log mean the hardware"
        ),
        tier=Priority.GENERAL,
    ),
    Rule(
        "assertion",
        Cause.ASSERTION,
        pattern(r"^(?:\S+: )?AssertionError\b:? ?(?P<what>.*)"),
        "The server's own check failed: {what}",
        say("the line above the error names the check: it usually states the setting that breaks it"),
        tier=Priority.GENERAL,
    ),
    Rule(
        "bug",
        Cause.ENGINE_BUG,
        pattern(
            r"^(?:\S+: )?(?:\w+\.)*(?P<type>TypeError|AttributeError|KeyError|IndexError|NameError|UnboundLocalError|NotImplementedError|ZeroDivisionError|RecursionError): (?P<what>.*)"
        ),
        "The server's code failed ({type}: {what}).",
        say("update the server, or go back to the version that ran; report it with the traceback"),
        tier=Priority.GENERAL,
    ),
)


def _killed_by_somebody(found: Found) -> bool:
    """Not the kernel: its records deny it, the signal is another one, or all memory had been taken before it served."""
    signals = (found.text("by"), found.text("by2"), found.text("by3"))
    return found.transcript.observed.oom_denied or "15" in signals or found.transcript.has_served


def _has_worker(found: Found) -> bool:
    return any(entry.line.process == "worker" for entry in found.transcript.entries[: found.index])


def _embedded_fix(found: Found) -> str:
    match = pattern(r'\bfix="((?:[^"\\]|\\.)*)"|\bfix=(\S+)').search(found.line.text)
    if match:
        return match[1] or match[2]
    entries = found.transcript.entries
    after = entries[found.index + 1].line.text.strip() if found.index + 1 < len(entries) else ""
    return after.removeprefix("fix: ") if after.startswith("fix: ") else "see the cause's page"
