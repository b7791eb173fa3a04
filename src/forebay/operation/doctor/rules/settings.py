"""What was asked for and cannot be: lengths, ranks, connectors, packages."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import say
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.rule import Kind, Priority, Requirement, Rule

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)
_MODULE = r"(?:ModuleNotMatchError: )?No module named '?(?P<package>[\w.]+)'?"


def _divide_fix(found: EventMatch) -> str:
    heads, ranks = found.number("heads"), found.number("ranks")
    if heads and ranks:
        fits = [n for n in range(1, int(heads) + 1) if int(heads) % n == 0 and n <= 64]
        near = min(fits, key=lambda n: (abs(n - ranks), n))
        return f"use tensor parallel {near} ({int(heads)} heads divide by {', '.join(map(str, fits))})"
    return "use a tensor-parallel size that divides the model's heads and its other dimensions"


def _context_fix(found: EventMatch) -> str:
    limit = found.number("limit")
    if limit:
        flag = "--context-length" if found.base.server == "sglang" else "--max-model-len"
        return f"set {flag} {int(limit)} or less, or extend the model with rope scaling (its config) before overriding the check"
    return "ask for no more than the model's own length (config.json, max_position_embeddings)"


def _package_fix(found: EventMatch) -> str:
    package = found.text("package").split(".")[0]
    known = {
        "sgl_kernel": "sgl-kernel",
        "nixl": "nixl",
        "lmcache": "lmcache",
        "mooncake": "mooncake-transfer-engine",
        "cv2": "opencv-python-headless",
    }
    if package:
        return f"install it in the server's environment: pip install {known.get(package, package)}, at the version the server's release names"
    return "install the missing package in the server's environment, at the version the server's release names"


def _numa_fix(found: EventMatch) -> str:
    number = found.number("ranks") or found.base.launch.ranks_per_host
    cores = "|".join(str(i) for i in range(int(number))) if number else "0-15|16-31"
    variable = "SGLANG_CPU_OMP_THREADS_BIND" if found.base.server == "sglang" else "VLLM_CPU_OMP_THREADS_BIND"
    return f'name the cores of each rank: {variable}="{cores}" (one list per rank, such as 0-15|16-31 on larger machines), or use fewer ranks'


_FRAME_FILE = pattern(r'File "(?P<path>[^"]+)"')
_SITE = pattern(
    r"(?:site-packages|dist-packages)/(?P<package>\w+)|/(?P<tree>sglang|vllm|lmcache|mooncake|transformers|flashinfer)/"
)


def _crosses_packages(found: EventMatch) -> bool:
    """The call that failed goes from one package into another: its last two frames, or the frame and the object, differ."""
    frames = [match["path"] for text in found.base.frames_of(found.index) if (match := _FRAME_FILE.search(text))]
    packages = [_package_of(path) for path in frames[-2:]]
    called = found.text("object").split(".")[0]
    if "." in found.text("object") and packages and packages[-1]:
        return called != packages[-1]
    return len(packages) == 2 and all(packages) and packages[0] != packages[1]


def _package_of(path: str) -> str:
    match = _SITE.search(path)
    return (match["package"] or match["tree"]) if match else ""


def _mismatch_fix(found: EventMatch) -> str:
    package = found.text("object").split(".")[0] if "." in found.text("object") else ""
    named = {"mooncake": "mooncake-transfer-engine", "sgl_kernel": "sgl-kernel"}.get(package, package)
    which = f" of {named}" if named else " of the two packages in the traceback"
    return f"install the version{which} that the server's release pins (`pip show` tells what is there)"


RULES = (
    Rule(
        "length_over_model",
        Cause.CTX_TOO_LONG_FOR_MODEL,
        "length_over_model",
        "{asked} tokens of context were asked for; the model is made for {limit}.",
        _context_fix,
        cases=("vllm/fail_len_over_model",),
    ),
    Rule(
        "cpu_connector",
        Cause.CONNECTOR_UNSUPPORTED,
        "cpu_connector",
        "The KV connector does not run here.",
        say(
            "choose a connector that this platform and version support: the offloading connectors need a GPU; on CPU vLLM's "
            "ExampleConnector works; without one drop --kv-transfer-config and --kv-offloading-size"
        ),
        servers=VLLM,
        cases=(
            "vllm/fail_kvc_unknown",
            "vllm/kv_offloading_size_1",
            "vllm/kvc_offloading_connector",
            "vllm/kvc_simple_cpu_offload",
        ),
    ),
    Rule(
        "nixl_missing",
        Cause.DEPENDENCY_MISSING,
        "nixl_missing",
        "A package that the connector needs is not installed: {package}.",
        say(
            "pip install it in the server's environment (nixl, mooncake-transfer-engine, lmcache), or choose another connector"
        ),
        cases=("vllm/fail_kvc_nixl",),
    ),
    Rule(
        "heads",
        Cause.TP_NOT_DIVISIBLE,
        "heads",
        "{heads} attention heads cannot be split over {ranks} ranks.",
        _divide_fix,
        cases=("vllm/tp2_auto",),
    ),
    Rule(
        "divisible",
        Cause.TP_NOT_DIVISIBLE,
        "divisible",
        "A dimension of the model cannot be split over the ranks.",
        _divide_fix,
        cases=(),
    ),
    Rule(
        "tp_assert",
        Cause.TP_NOT_DIVISIBLE,
        "tp_assert",
        "The model's heads cannot be split over the ranks.",
        _divide_fix,
    ),
    Rule(
        "numa",
        Cause.NUMA_BINDING,
        "numa",
        "There are fewer NUMA nodes than ranks, so threads cannot be bound automatically.",
        _numa_fix,
        cases=("vllm/tp2_dummy_auto", "vllm/tp3_auto", "sglang/fail_tp2_no_omp_bind"),
    ),
    Rule(
        "hicache_on_decode",
        Cause.HICACHE_NOT_ON_DECODE,
        "hicache_on_decode",
        "A decode leg forces the radix cache off, so --enable-hierarchical-cache cannot be used there.",
        say(
            "drop --enable-hierarchical-cache on the decode leg; use it on prefill, or pass --disaggregation-decode-enable-radix-cache where the version has it"
        ),
        servers=SGLANG,
        needs=(Requirement("decode_leg"),),
    ),
    Rule(
        "hicache_kernel",
        Cause.HICACHE_KERNEL_UNSUPPORTED,
        "hicache_kernel",
        "HiCache's copy kernel ({kernel}) does not exist in this build: the io backend `kernel` needs CUDA.",
        say("set --hicache-io-backend direct"),
        servers=SGLANG,
        cases=("sglang/fail_hicache_io_kernel",),
    ),
    Rule(
        "no_module",
        Cause.DEPENDENCY_MISSING,
        "no_module",
        "A Python package is missing: {package}.",
        _package_fix,
        cases=("sglang/fail_no_cpu_engine_env", "sglang/fail_no_sgl_kernel_stub", "vllm/fail_kvc_lmcache"),
    ),
    Rule(
        "no_metadata",
        Cause.DEPENDENCY_MISSING,
        "no_metadata",
        "The package {package} is not installed under that name.",
        say(
            "start it with `python -m vllm.entrypoints.openai.api_server`, or install the distribution called {package}"
        ),
        cases=("vllm/fail_console_script",),
    ),
    Rule(
        "tier_never_read",
        Cause.DEPENDENCY_MISMATCH,
        "api_mismatch",
        "A call into another package fails ({what}): the versions do not fit, and the server runs on without what it asked for.",
        _mismatch_fix,
        kind=Kind.DEGRADED,
        needs=(Requirement("cache_tier_failing"),),
    ),
    Rule(
        "api_mismatch",
        Cause.DEPENDENCY_MISMATCH,
        "api_mismatch",
        "A call into another package failed ({what}): the versions do not fit each other.",
        _mismatch_fix,
        priority=Priority.GENERAL,
        check=_crosses_packages,
    ),
    Rule(
        "import_failed",
        Cause.DEPENDENCY_MISSING,
        "import_failed",
        "A package is there and does not fit the others: {what}.",
        say("reinstall the server's environment from its own pinned requirements; the message names the package"),
        priority=Priority.GENERAL,
    ),
    Rule(
        "command_missing",
        Cause.DEPENDENCY_MISSING,
        "command_missing",
        "The program itself is not on the PATH: {package}.",
        say("activate the server's environment, or name the interpreter in it"),
    ),
)
