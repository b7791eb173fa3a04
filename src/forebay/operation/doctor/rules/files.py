"""The checkpoint: missing, broken, not understood, or not ours to read."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import say
from forebay.operation.doctor.rule import Priority, Requirement, Rule

__all__ = ["RULES"]

_CHECKPOINT_FILE = r"\S*?(?:\.safetensors|\.bin|\.pt|\.pth|\.gguf|config\.json|params\.json|index\.json)"


def _path_fix(found: EventMatch) -> str:
    path = found.text("path")
    where = f"{path} " if path else "the model's folder "
    return (
        f"check {where}from inside the container (`ls -L`): a dangling link, a path not mounted, or a name that was meant for the hub; "
        "HF_HUB_OFFLINE=1 allows no download"
    )


def _corrupt_fix(found: EventMatch) -> str:
    return (
        "compare each file's size with its index (a safetensors file is 8 + header + data bytes) and fetch the short one again; an "
        "interrupted download or a git-lfs pointer looks like this"
    )


RULES = (
    Rule(
        "file_missing",
        Cause.CHECKPOINT_MISSING,
        "file_missing",
        "A file of the checkpoint is not there: {path}.",
        _path_fix,
        rules_out=(
            (Cause.HOST_OOM_KILLED, "the exit code of the scheduler is its own crash (-3), not the kernel's kill"),
        ),
        cases=("index_57984421316",),
    ),
    Rule(
        "hub_unreachable",
        Cause.CHECKPOINT_MISSING,
        "hub_unreachable",
        "The model is neither a local folder nor in the cache, and the hub could not be asked.",
        _path_fix,
        cases=("sglang/fail_model_missing", "vllm/fail_model_hub_offline"),
    ),
    Rule(
        "not_a_repo",
        Cause.CHECKPOINT_MISSING,
        "not_a_repo",
        "{path} does not exist here, so it was taken for a hub name, which it is not.",
        _path_fix,
        cases=("vllm/fail_model_missing",),
    ),
    Rule(
        "invalid_folder",
        Cause.CHECKPOINT_MISSING,
        "invalid_folder",
        "The model's folder or hub name holds no model: {path}.",
        _path_fix,
        cases=("vllm/fail_no_config",),
    ),
    Rule(
        "no_weights",
        Cause.CHECKPOINT_MISSING,
        "no_weights",
        "The folder holds no weights: {path}.",
        _path_fix,
    ),
    Rule(
        "truncated",
        Cause.CHECKPOINT_CORRUPT,
        "truncated",
        "A weights file is cut short or not what its name says.",
        _corrupt_fix,
        cases=("vllm/fail_truncated_weights",),
    ),
    Rule(
        "config_broken",
        Cause.CHECKPOINT_CORRUPT,
        "config_broken",
        "A JSON file of the checkpoint cannot be parsed: {path}.",
        _corrupt_fix,
        needs=(Requirement("checkpoint_file_named", "block"),),
        excludes=(Requirement("json_option_named", "block"),),
    ),
    Rule(
        "weights_do_not_fit_model",
        Cause.CHECKPOINT_CORRUPT,
        "weights_do_not_fit_model",
        "The weights do not fit the model that config.json describes.",
        say(
            "the files belong to different models or revisions: fetch the whole checkpoint again, config.json included"
        ),
        priority=Priority.GENERAL,
    ),
    Rule(
        "tokenizer",
        Cause.TOKENIZER_MISSING,
        "tokenizer",
        "The model's folder has no usable tokenizer.",
        say(
            "copy tokenizer.json and tokenizer_config.json (or tokenizer.model) of the same model into the folder, or pass --tokenizer / --tokenizer-path"
        ),
        cases=("vllm/fail_no_tokenizer",),
    ),
    Rule(
        "tokenizer_converter",
        Cause.TOKENIZER_MISSING,
        "tokenizer_converter",
        "The tokenizer cannot be converted: a package for its format is missing.",
        say(
            "pip install sentencepiece tiktoken protobuf in the server's environment, or add tokenizer.json to the folder"
        ),
    ),
    Rule(
        "architecture",
        Cause.UNSUPPORTED_ARCHITECTURE,
        "architecture",
        "This version does not know the model's architecture: {name}.",
        say(
            "update the server (and its transformers) to a version that lists the architecture, or choose another server; check `architectures` in config.json"
        ),
    ),
    Rule(
        "auth",
        Cause.LICENSE_OR_AUTH,
        "auth",
        "The hub refused the model: a licence to accept, or a token that is missing.",
        say(
            "accept the licence on the model's page, then `hf auth login` or HF_TOKEN=…; or name a folder that is already downloaded"
        ),
        excludes=(Requirement("repository_not_found", "block"),),
    ),
    Rule(
        "disk_full",
        Cause.CHECKPOINT_MISSING,
        "disk_full",
        "The download did not fit the disk, so the checkpoint is not whole.",
        say("free the disk of HF_HOME, or set HF_HOME to a larger one, and start again: the download resumes"),
    ),
    Rule(
        "trust_remote_code",
        Cause.UNSUPPORTED_ARCHITECTURE,
        "trust_remote_code",
        "The model brings its own code, which the server does not run unasked.",
        say(
            "read the model's code, then pass --trust-remote-code; or update to a version that has the architecture built in"
        ),
    ),
)
