"""What was asked for and cannot be: lengths, ranks, connectors, packages."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import ranks_of, say
from forebay.operation.doctor.rule import Found, Need, Priority, Rule, Where, pattern

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)
_MODULE = r"(?:ModuleNotFoundError: )?No module named '?(?P<package>[\w.]+)'?"


def _divide_fix(found: Found) -> str:
    heads, ranks = found.number("heads"), found.number("ranks")
    if heads and ranks:
        fits = [n for n in range(1, int(heads) + 1) if int(heads) % n == 0 and n <= 64]
        near = min(fits, key=lambda n: (abs(n - ranks), n))
        return f"use tensor parallel {near} ({int(heads)} heads divide by {', '.join(map(str, fits))})"
    return f"use a tensor-parallel size that divides the model's heads (asked for: {ranks_of(found)})"


def _context_fix(found: Found) -> str:
    limit = found.number("limit")
    if limit:
        flag = "--context-length" if found.transcript.server == "sglang" else "--max-model-len"
        return f"set {flag} {int(limit)} or less, or extend the model with rope scaling (its config) before overriding the check"
    return "ask for no more than the model's own length (config.json, max_position_embeddings)"


def _package_fix(found: Found) -> str:
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


def _numa_fix(found: Found) -> str:
    ranks = ranks_of(found)
    number = found.number("ranks")
    ranks = int(number) if number else max(ranks, 2)
    cores = "|".join(str(i) for i in range(ranks))
    variable = "SGLANG_CPU_OMP_THREADS_BIND" if found.transcript.server == "sglang" else "VLLM_CPU_OMP_THREADS_BIND"
    return f'name the cores of each rank: {variable}="{cores}" (lists such as 0-15|16-31 on larger machines), or use fewer ranks'


RULES = (
    Rule(
        "length_over_model",
        Cause.CTX_TOO_LONG_FOR_MODEL,
        pattern(
            r"(?:User-specified|Target model's) (?:max_model_len|context_length) \((?P<asked>\d+)\) is greater than the derived (?:max_model_len|context_length) "
            r"\((?:\w+=)?(?P<limit>\d+)"
        ),
        "{asked} tokens of context were asked for; the model is made for {limit}.",
        _context_fix,
        cases=("vllm/fail_len_over_model",),
    ),
    Rule(
        "cpu_connector",
        Cause.CONNECTOR_UNSUPPORTED,
        pattern(
            r"CPU Offloading is currently only supported on|_StreamPlaceholder|Unsupported connector type: (?P<name>\w+)|[Cc]onnector .{0,60}(?:is not supported|does not support)|hipMemcpyBatchAsync is unavailable|(?:Unknown|Unregistered|Unsupported) (?:KV )?connector"
        ),
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
        pattern(
            r"(?P<package>NIXL|Mooncake|LMCache|FlexKV) is not (?:available|installed)|Please install (?P<package2>\w+)"
        ),
        "A package that the connector needs is not installed: {package}.",
        say(
            "pip install it in the server's environment (nixl, mooncake-transfer-engine, lmcache), or choose another connector"
        ),
        cases=("vllm/fail_kvc_nixl",),
    ),
    Rule(
        "heads",
        Cause.TP_NOT_DIVISIBLE,
        pattern(
            r"[Tt]otal number of attention heads \((?P<heads>\d+)\) must be divisible by (?:the )?tensor[ -]parallel size \((?P<ranks>\d+)\)"
        ),
        "{heads} attention heads cannot be split over {ranks} ranks.",
        _divide_fix,
        cases=("vllm/tp2_auto",),
    ),
    Rule(
        "divisible",
        Cause.TP_NOT_DIVISIBLE,
        pattern(
            r"(?P<heads>\d+) is not divisible by (?P<ranks>\d+)|(?:heads?|vocab\w*|size|intermediate\w*|channels|dim\w*)\b[^.]{0,80}\b(?:must be|is not|not|should be) divisible by[^.]{0,40}\b(?:tp|tensor|world|parallel|rank)|tp_size must be divisible by"
        ),
        "A dimension of the model cannot be split over the ranks.",
        _divide_fix,
        cases=(),
    ),
    Rule(
        "tp_assert",
        Cause.TP_NOT_DIVISIBLE,
        pattern(
            r"assert self\.total_num(?:_kv)?_heads % tp_size == 0|assert \w*heads\w* % \w*(?:tp|world)_size\w* == 0"
        ),
        "The model's heads cannot be split over the ranks.",
        _divide_fix,
        where=Where.STACK,
    ),
    Rule(
        "numa",
        Cause.NUMA_BINDING,
        pattern(
            r"Not enough allowed NUMA nodes to bind threads of (?P<ranks>\d+)|SGLANG_CPU_OMP_THREADS_BIND is not set, in this case|"
            r"(?:set_mempolicy|mbind|numa_bind|numa_run_on_node)\b.*(?:fail|denied|not permitted|Invalid argument)"
        ),
        "There are fewer NUMA nodes than ranks, so threads cannot be bound automatically.",
        _numa_fix,
        cases=("vllm/tp2_dummy_auto", "vllm/tp3_auto", "sglang/fail_tp2_no_omp_bind"),
    ),
    Rule(
        "hicache_on_decode",
        Cause.HICACHE_NOT_ON_DECODE,
        pattern(r"enable-hierarchical-cache and disable-radix-cache are mutually exclusive"),
        "A decode leg forces the radix cache off, so --enable-hierarchical-cache cannot be used there.",
        say(
            "drop --enable-hierarchical-cache on the decode leg; use it on prefill, or pass --disaggregation-decode-enable-radix-cache where the version has it"
        ),
        servers=SGLANG,
        needs=(Need(pattern(r"disaggregation[-_]mode['\": =]+decode|decode server")),),
    ),
    Rule(
        "hicache_kernel",
        Cause.HICACHE_KERNEL_UNSUPPORTED,
        pattern(
            r"(?:name|module .*attribute) '(?P<kernel>transfer_kv\w*)'|transfer_kv\w* .*(?:not (?:supported|implemented|found|defined|available))|hicache[-_ ]io[-_ ]backend\W+kernel\b.*(?:not supported|requires|only)|no attribute '(?P<kernel2>transfer_kv\w*)'|[Uu]nsupported layout.*io[_ ]backend|IO backend .*is not supported"
        ),
        "HiCache's copy kernel ({kernel}) does not exist in this build: the io backend `kernel` needs CUDA.",
        say("set --hicache-io-backend direct"),
        servers=SGLANG,
        cases=("sglang/fail_hicache_io_kernel",),
    ),
    Rule(
        "no_module",
        Cause.DEPENDENCY_MISSING,
        pattern(r"(?:^|[:\"' ])" + _MODULE),
        "A Python package is missing: {package}.",
        _package_fix,
        cases=("sglang/fail_no_cpu_engine_env", "sglang/fail_no_sgl_kernel_stub", "vllm/fail_kvc_lmcache"),
    ),
    Rule(
        "no_metadata",
        Cause.DEPENDENCY_MISSING,
        pattern(
            r"PackageNotFoundError: No package metadata was found for (?P<package>[\w-]+)|DistributionNotFound|The '(?P<package2>[\w-]+)\S*' distribution was not found"
        ),
        "The package {package} is not installed under that name.",
        say(
            "start it with `python -m vllm.entrypoints.openai.api_server`, or install the distribution called {package}"
        ),
        cases=("vllm/fail_console_script",),
    ),
    Rule(
        "import_failed",
        Cause.DEPENDENCY_MISSING,
        pattern(
            r"ImportError: (?P<what>(?:cannot import name|.*undefined symbol|.*version `?(?:GLIBC|GLIBCXX|CXXABI)|(?!.*libcuda\.so).*cannot open shared object file).*)|requires (?P<package>[\w-]+)(?:[<>=]=?[\d.]+)+ but|operator torchvision::nms does not exist"
        ),
        "A package is there and does not fit the others: {what}.",
        say("reinstall the server's environment from its own pinned requirements; the message names the package"),
        tier=Priority.GENERAL,
    ),
    Rule(
        "command_missing",
        Cause.DEPENDENCY_MISSING,
        pattern(
            r"^(?:\S+: )*(?:line \d+: )?(?P<package>vllm|sglang|python3?|lmcache\w*|mooncake_master|ray)\b: (?:command )?not found|exec: \"(?P<package2>[\w./-]+)\": executable file not found"
        ),
        "The program itself is not on the PATH: {package}.",
        say("activate the server's environment, or name the interpreter in it"),
        where=Where.ANY,
    ),
)
