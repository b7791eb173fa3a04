"""Flags, values and keys that this version of the server refuses."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import closest_flag, say
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.rule import Priority, Rule

__all__ = ["RENAMED_FLAGS", "RULES"]

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


def _unrecognized(found: EventMatch) -> list[str]:
    words = found.text("words").split()
    return [word.split("=")[0] for word in words if word.startswith("-")]


def _is_renamed(found: EventMatch) -> bool:
    return any(word in RENAMED_FLAGS for word in _unrecognized(found))


def _renamed_fix(found: EventMatch) -> str:
    parts = [f"{word} is now {RENAMED_FLAGS[word]}" for word in _unrecognized(found) if word in RENAMED_FLAGS]
    return "; ".join(parts)


def _unknown_fix(found: EventMatch) -> str:
    known = found.base.transcript.sources[found.source].usage_flags
    parts = []
    for word in _unrecognized(found):
        near = closest_flag(word, known)
        parts.append(f"write {near} instead of {word}" if near else f"remove {word}: this version has no such flag")
    return "; ".join(parts) or "remove it: this version has no such flag"


def _value_fix(found: EventMatch) -> str:
    flag, what = found.text("flag").strip(), found.text("what")
    choice = pattern(r"invalid choice: '(?P<bad>[^']*)' \(choose from (?P<choices>.+)\)").search(what)
    if choice:
        choices = [item.strip(" '\"") for item in choice["choices"].split(",")]
        near = closest_flag(choice["bad"], choices)
        hint = f"; nearest: {near}" if near else ""
        return f"set {flag} to one of {', '.join(choices)}{hint}"
    detail = _detail_after(found)
    return f"correct {flag or 'the command line'}: {detail or what}"


def _detail_after(found: EventMatch) -> str:
    """pydantic puts the field (if any) and the reason on the lines after its heading."""
    parts: list[str] = []
    for index in range(found.index + 1, min(found.index + 4, len(found.base.transcript.entries))):
        text = found.base.transcript.entries[index].line.text.strip()
        if text.startswith("For further information"):
            break
        parts.append(text.split(" [type=")[0][:200])
        if "[type=" in text:
            break
    return ": ".join(part for part in parts if part)


def _field_fix(found: EventMatch) -> str:
    entries = found.base.transcript.entries
    field = entries[found.index - 1].line.text.strip() if found.index else ""
    flag = "--" + field.replace("_", "-") if pattern(r"^\w+$").match(field) else "the setting"
    return f"correct {flag}: {found.text('what')} (it was {found.text('value')})"


def _integer_fix(found: EventMatch) -> str:
    block = found.base.transcript.block_of(found.index)
    names = found.base.transcript.search(pattern(r"VLLM_CPU_KVCACHE_SPACE|cpu_kvcache_space|KVCACHE_SPACE"), block)
    what = (
        "VLLM_CPU_KVCACHE_SPACE takes whole GiB"
        if names is not None or found.base.server == "vllm"
        else "it takes a whole number"
    )
    return f"{what}: write 1 or more instead of {found.text('value')!r}; --kv-cache-memory-bytes 20M is finer"


RULES = (
    Rule(
        "flag_renamed",
        Cause.FLAG_RENAMED,
        "flag_unrecognized",
        "A flag of an older version: {words}.",
        _renamed_fix,
        check=_is_renamed,
    ),
    Rule(
        "flag_unknown",
        Cause.BAD_FLAG,
        "flag_unrecognized",
        "The server has no such flag: {words}.",
        _unknown_fix,
        check=lambda found: not _is_renamed(found),
        cases=("sglang/fail_bad_flag", "vllm/fail_bad_flag"),
    ),
    Rule(
        "flag_value",
        Cause.BAD_FLAG,
        "flag_value",
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
        "key_renamed",
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
        "flag_gone",
        "{old} was replaced by {new}.",
        say("use {new}"),
    ),
    Rule(
        "argument_removed",
        Cause.FLAG_RENAMED,
        "argument_removed",
        "The argument {old} was removed.",
        say("use {new}"),
    ),
    Rule(
        "validation_field",
        Cause.BAD_FLAG,
        "validation_field",
        "A setting is out of its range or of the wrong type: {value}. {what}.",
        lambda found: _field_fix(found),
        priority=Priority.SPECIFIC,
        cases=("vllm/fail_bad_gmu_range",),
    ),
    Rule(
        "validation_number",
        Cause.BAD_FLAG,
        "validation_number",
        "A setting must be an integer: {value} is none.",
        lambda found: _integer_fix(found),
        cases=("vllm/fail_kvspace_float",),
    ),
    Rule(
        "parser_unknown",
        Cause.BAD_FLAG,
        "parser_unknown",
        "A setting names something this version does not have.",
        say("choose one of the values that the message lists"),
    ),
    Rule(
        "conflict",
        Cause.FLAG_CONFLICT,
        "conflict",
        "Two settings exclude each other.",
        lambda found: f"drop one of the two that the message names: {found.line.text.strip()[:300]}",
        priority=Priority.GENERAL,
    ),
)
