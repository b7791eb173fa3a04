"""What was asked for and cannot be: flags, lengths, ranks, connectors, packages."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import closest_flag, ranks_of, say
from forebay.operation.doctor.rule import Found, Need, Rule, Tier, Where, pattern

__all__ = ["RENAMED_FLAGS", "RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)

RENAMED_FLAGS = {
    # old flag or key -> what replaces it. Sources: the servers' release notes and argument tables.
    "--disable-log-requests": "--no-enable-log-requests",
    "--swap-space": "--kv-offloading-size",
    "--cpu-offload-gb-kv": "--kv-offloading-size",
    "--enable-chunked-prefill-size": "--max-num-batched-tokens",
    "--use-v2-block-manager": "nothing: remove it",
    "--num-lookahead-slots": "--speculative-config",
    "--speculative-model": "--speculative-config '{\"model\": …}'",
    "--num-speculative-tokens": "--speculative-config '{\"num_speculative_tokens\": …}'",
    "--ngram-prompt-lookup-max": "--speculative-config '{\"prompt_lookup_max\": …}'",
    "--guided-decoding-backend": "--structured-outputs-config.backend",
    "--enable-reasoning": "--reasoning-parser",
    "--worker-use-ray": "--distributed-executor-backend ray",
    "--engine-use-ray": "--distributed-executor-backend ray",
    "--max-seq-len-to-capture": "--cudagraph-capture-sizes",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "--compilation-level": "--optimization-level",
    "--disable-cuda-graph": "--cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--enable-ep-moe": "--ep-size",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
    "--enable-flashinfer-moe": "--moe-runner-backend flashinfer_cutlass",
    "--enable-flashinfer-cutlass-moe": "--moe-runner-backend flashinfer_cutlass",
    "--enable-flashinfer-trtllm-moe": "--moe-runner-backend flashinfer_trtllm",
    "--enable-flashinfer-mla": "--attention-backend flashinfer",
    "--enable-flashmla": "--attention-backend flashmla",
    "--disable-flashinfer": "--attention-backend triton",
    "--disable-flashinfer-sampling": "--sampling-backend pytorch",
    "--speculative-draft": "--speculative-draft-model-path",
    "--nccl-init-addr": "--dist-init-addr",
    "--hicache-oracle": "nothing: remove it",
    "--disable-radix": "--disable-radix-cache",
    "--disable-outlines-disk-cache": "nothing: remove it",
    "num_cpu_blocks": "cpu_bytes_to_use",
    "lora_extra_vocab_size": "nothing: remove it",
}
"""Flags that older recipes use and current servers refuse."""


def _unrecognized(found: Found) -> list[str]:
    words = found.text("words").split()
    return [word.split("=")[0] for word in words if word.startswith("-")]


def _is_renamed(found: Found) -> bool:
    return any(word in RENAMED_FLAGS for word in _unrecognized(found))


def _renamed_fix(found: Found) -> str:
    parts = [f"{word} is now {RENAMED_FLAGS[word]}" for word in _unrecognized(found) if word in RENAMED_FLAGS]
    return "; ".join(parts)


def _unknown_fix(found: Found) -> str:
    known = found.transcript.sources[found.source].usage_flags
    parts = []
    for word in _unrecognized(found):
        near = closest_flag(word, known)
        parts.append(f"write {near} instead of {word}" if near else f"remove {word}: this version has no such flag")
    return "; ".join(parts) or "remove it: this version has no such flag"


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


_MODULE = r"(?:ModuleNotFoundError: )?No module named '?(?P<package>[\w.]+)'?"

RULES = (
    Rule(
        "flag_renamed",
        Cause.FLAG_RENAMED,
        pattern(r"(?:error: unrecognized arguments: |^Error: No such option:? )(?P<words>.+)"),
        "A flag of an older version: {words}.",
        _renamed_fix,
        check=_is_renamed,
    ),
    Rule(
        "flag_unknown",
        Cause.BAD_FLAG,
        pattern(r"(?:error: unrecognized arguments: |^Error: No such option:? )(?P<words>.+)"),
        "The server has no such flag: {words}.",
        _unknown_fix,
        check=lambda found: not _is_renamed(found),
        cases=("sglang/fail_bad_flag", "vllm/fail_bad_flag"),
    ),
    Rule(
        "flag_value",
        Cause.BAD_FLAG,
        pattern(
            r"^[\w./ -]{1,80}: error: (?:argument (?P<flag>[^:]+): (?P<what>.+)|(?P<what2>(?:the following arguments are required|ambiguous option|one of the arguments|expected|not allowed).*))"
        ),
        "A flag's value was refused: {flag} {what}.",
        lambda found: _value_fix(found),
        cases=(
            "sglang/fail_bad_choice",
            "vllm/fail_bad_choice",
            "vllm/fail_bad_value",
            "vllm/fail_kvc_badjson",
            "vllm/fail_kvc_norole",
            "vllm/fail_kvc_badrole",
            "vllm/fail_kvc_unknown_key",
        ),
    ),
    Rule(
        "key_renamed",
        Cause.FLAG_RENAMED,
        pattern(r"(?P<new>cpu_bytes_to_use) must be specified in kv_connector_extra_config"),
        "The connector's size is given under its new name only: {new} replaced num_cpu_blocks.",
        say(
            'put "cpu_bytes_to_use": BYTES into kv_connector_extra_config (BYTES = blocks x bytes per block; GiB x 1073741824)'
        ),
        servers=VLLM,
        cases=("index_61924033443",),
    ),
    Rule(
        "flag_gone",
        Cause.FLAG_RENAMED,
        pattern(
            r"(?P<old>[\w-]*[-_][\w-]+|'\S+'|`\S+`) (?:has been|was|is) (?:renamed to|replaced by|removed(?: and replaced by|; use| in favou?r of)) (?P<new>[\w`'\"-]+)"
        ),
        "{old} was replaced by {new}.",
        say("use {new}"),
    ),
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
        "validation_field",
        Cause.BAD_FLAG,
        pattern(r"^\s*(?P<what>Input should be .+?) \[type=(?P<type>\w+), input_value=(?P<value>.+?), input_type"),
        "A setting is out of its range or of the wrong type: {value}. {what}.",
        lambda found: _field_fix(found),
        tier=Tier.SPECIFIC,
        cases=("vllm/fail_bad_gmu_range",),
    ),
    Rule(
        "validation_number",
        Cause.BAD_FLAG,
        pattern(r"(?:Value error, |ValueError: )?invalid literal for int\(\) with base 10: '(?P<value>[^']*)'"),
        "A setting must be an integer: {value} is none.",
        lambda found: _integer_fix(found),
        cases=("vllm/fail_kvspace_float",),
    ),
    Rule(
        "parser_unknown",
        Cause.BAD_FLAG,
        pattern(
            r"invalid (?:tool call|reasoning) parser: (?P<value>\S+)|(?:Unknown|Unsupported|Invalid) (?P<kind>quantization|load[_ ]format|dtype|attention[_ ]backend|tool[_ -]call[_ -]parser|reasoning[_ -]parser)\b",
            ignore_case=True,
        ),
        "A setting names something this version does not have.",
        say("choose one of the values that the message lists"),
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
        "conflict",
        Cause.FLAG_CONFLICT,
        pattern(
            r"mutually exclusive|cannot be (?:used|set|enabled|combined|specified) (?:together|with|at the same time|simultaneously|when)|(?:can ?not|can't) (?:both be|use both|set both|specify both)|"
            r"(?:is|are) (?:not compatible|incompatible) with|(?:--[\w-]+|\w+_\w+) (?:currently )?(?:requires?|is only supported with|only supports?|does not support) (?:the )?`?--[\w-]+|not supported (?:together )?with --[\w-]+|does not support --[\w-]+|conflicts with"
        ),
        "Two settings exclude each other.",
        lambda found: f"drop one of the two that the message names: {found.line.text.strip()[:300]}",
        tier=Tier.GENERAL,
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
        tier=Tier.GENERAL,
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


def _value_fix(found: Found) -> str:
    flag, what = found.text("flag").strip(), found.text("what") or found.text("what2")
    choice = pattern(r"invalid choice: '(?P<bad>[^']*)' \(choose from (?P<choices>.+)\)").search(what)
    if choice:
        choices = [item.strip(" '\"") for item in choice["choices"].split(",")]
        near = closest_flag(choice["bad"], choices)
        hint = f"; nearest: {near}" if near else ""
        return f"set {flag} to one of {', '.join(choices)}{hint}"
    detail = _detail_after(found)
    return f"correct {flag or 'the command line'}: {detail or what}"


def _detail_after(found: Found) -> str:
    """pydantic puts the field (if any) and the reason on the lines after its heading."""
    parts: list[str] = []
    for index in range(found.index + 1, min(found.index + 4, len(found.transcript.entries))):
        text = found.transcript.entries[index].line.text.strip()
        if text.startswith("For further information"):
            break
        parts.append(text.split(" [type=")[0][:200])
        if "[type=" in text:
            break
    return ": ".join(part for part in parts if part)


def _field_fix(found: Found) -> str:
    entries = found.transcript.entries
    field = entries[found.index - 1].line.text.strip() if found.index else ""
    flag = "--" + field.replace("_", "-") if pattern(r"^\w+$").match(field) else "the setting"
    return f"correct {flag}: {found.text('what')} (it was {found.text('value')})"


def _integer_fix(found: Found) -> str:
    block = found.transcript.block_of(found.index)
    names = found.transcript.search(pattern(r"VLLM_CPU_KVCACHE_SPACE|cpu_kvcache_space|KVCACHE_SPACE"), block)
    what = (
        "VLLM_CPU_KVCACHE_SPACE takes whole GiB"
        if names is not None or found.transcript.server == "vllm"
        else "it takes a whole number"
    )
    return f"{what}: write 1 or more instead of {found.text('value')!r}; --kv-cache-memory-bytes 20M is finer"
