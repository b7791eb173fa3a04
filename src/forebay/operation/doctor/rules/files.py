"""The checkpoint: missing, broken, not understood, or not ours to read."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import say
from forebay.operation.doctor.rule import Found, Need, Priority, Rule, pattern

__all__ = ["RULES"]

_CHECKPOINT_FILE = r"\S*?(?:\.safetensors|\.bin|\.pt|\.pth|\.gguf|config\.json|params\.json|index\.json)"


def _path_fix(found: Found) -> str:
    path = found.text("path") or found.text("path2")
    where = f"{path} " if path and path != "?" else "the model's folder "
    return (
        f"check {where}from inside the container (`ls -L`): a dangling link, a path not mounted, or a name that was meant for the hub; "
        "HF_HUB_OFFLINE=1 allows no download"
    )


def _corrupt_fix(found: Found) -> str:
    return (
        "compare each file's size with its index (a safetensors file is 8 + header + data bytes) and fetch the short one again; an "
        "interrupted download or a git-lfs pointer looks like this"
    )


RULES = (
    Rule(
        "file_missing",
        Cause.CHECKPOINT_MISSING,
        pattern(
            rf"(?:FileNotFoundError: )?\[Errno 2\] No such file or directory: '(?P<path>{_CHECKPOINT_FILE})'|No such file or directory: \"?(?P<path2>{_CHECKPOINT_FILE})"
        ),
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
        pattern(
            r"We couldn't connect to '?https?://\S+ to load|Cannot find (?:the requested files|an appropriate cached snapshot folder)|LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled"
        ),
        "The model is neither a local folder nor in the cache, and the hub could not be asked.",
        _path_fix,
        cases=("sglang/fail_model_missing", "vllm/fail_model_hub_offline"),
    ),
    Rule(
        "not_a_repo",
        Cause.CHECKPOINT_MISSING,
        pattern(
            r"Repo id must (?:be in the form|use alphanumeric chars)[^:]*: '(?P<path>[^']+)'|HFValidationError(?:.*': '(?P<path2>[^']+)')?"
        ),
        "{path} does not exist here, so it was taken for a hub name, which it is not.",
        _path_fix,
        cases=("vllm/fail_model_missing",),
    ),
    Rule(
        "invalid_folder",
        Cause.CHECKPOINT_MISSING,
        pattern(
            r"Invalid repository ID or local directory specified: '(?P<path>[^']+)'|(?P<path2>\S+) (?:is not a local folder and is not a valid model identifier|does not appear to have a file named (?:config\.json|(?:pytorch_)?model\S*))|Repository Not Found for url|RepositoryNotFoundError|EntryNotFoundError|RevisionNotFoundError"
        ),
        "The model's folder or hub name holds no model: {path}.",
        _path_fix,
        cases=("vllm/fail_no_config",),
    ),
    Rule(
        "no_weights",
        Cause.CHECKPOINT_MISSING,
        pattern(
            r"Cannot find any model weights with `?(?P<path>[^`\s]+)|No (?:safetensors|model) (?:weights|files) (?:were )?found|[Nn]o \.?safetensors .*found|model path (?P<path2>\S+) does not exist|[Mm]odel (?:directory|folder|path) .*(?:does not exist|not found)"
        ),
        "The folder holds no weights: {path}.",
        _path_fix,
    ),
    Rule(
        "truncated",
        Cause.CHECKPOINT_CORRUPT,
        pattern(
            r"SafetensorError: |Error while deserializing header|incomplete metadata, file not fully covered|MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeader\w*|header too (?:large|small)|"
            r"PytorchStreamReader failed|invalid load key|unexpected EOF, expected \d+ more bytes|"
            r"(?:does not match|inconsistent) .*checksum|[Cc]hecksum mismatch"
        ),
        "A weights file is cut short or not what its name says.",
        _corrupt_fix,
        cases=("vllm/fail_truncated_weights",),
    ),
    Rule(
        "config_broken",
        Cause.CHECKPOINT_CORRUPT,
        pattern(r"config file at '(?P<path>[^']+)' is not a valid JSON|JSONDecodeError: (?P<what>.+)"),
        "A JSON file of the checkpoint cannot be parsed: {path}.",
        _corrupt_fix,
        needs=(Need(pattern(r"config|index\.json|tokenizer|from_pretrained|safetensors"), "block"),),
        excludes=(Need(pattern(r"kv[-_]transfer[-_]config|extra[-_]config|hf[-_]overrides|argument --"), "block"),),
    ),
    Rule(
        "weights_do_not_fit_model",
        Cause.CHECKPOINT_CORRUPT,
        pattern(
            r"(?:size mismatch for|The size of tensor .* must match|[Ww]eights? (?:were|was) not initialized from checkpoint|(?:shape|Shape) mismatch|param\.size\(\) == loaded_weight\.size\(\)|Attempted to load weight \(.*\) into parameter|"
            r"Missing (?:keys?|tensors?|shards?) in (?:checkpoint|state_dict)|some (?:weights|parameters) .*not (?:found|initialized))"
        ),
        "The weights do not fit the model that config.json describes.",
        say(
            "the files belong to different models or revisions: fetch the whole checkpoint again, config.json included"
        ),
        tier=Priority.GENERAL,
    ),
    Rule(
        "tokenizer",
        Cause.TOKENIZER_MISSING,
        pattern(
            r"Couldn't instantiate the backend tokenizer|Can't load tokenizer for '(?P<path>[^']+)'|Unable to load (?:vocabulary|tokenizer) from|"
            r"[Tt]okenizer (?:class|file|model)\b.*(?:does not exist|not found|not currently imported)|No such file or directory: '\S*(?:tokenizer\w*\.(?:json|model)|vocab\.\w+|merges\.txt)'|"
            r"expected str, bytes or os\.PathLike object, not NoneType.*(?:vocab|tokenizer)"
        ),
        "The model's folder has no usable tokenizer.",
        say(
            "copy tokenizer.json and tokenizer_config.json (or tokenizer.model) of the same model into the folder, or pass --tokenizer / --tokenizer-path"
        ),
        cases=("vllm/fail_no_tokenizer",),
    ),
    Rule(
        "tokenizer_converter",
        Cause.TOKENIZER_MISSING,
        pattern(r"(?:need|requires?|install) .{0,40}(?:sentencepiece|tiktoken|protobuf)\b.{0,60}(?:tokenizer|convert)"),
        "The tokenizer cannot be converted: a package for its format is missing.",
        say(
            "pip install sentencepiece tiktoken protobuf in the server's environment, or add tokenizer.json to the folder"
        ),
    ),
    Rule(
        "architecture",
        Cause.UNSUPPORTED_ARCHITECTURE,
        pattern(
            r"[Mm]odel architectures? (?P<name>\[[^\]]*\]|\S+) (?:are|is) not supported|model type `?'?(?P<type>[\w-]+)`?'? but Transformers does not recognize|"
            r"Unrecognized (?:model in|configuration class)|[Uu]nsupported (?:model )?architectures?\b|(?:has no|no) (?:vLLM|SGLang) implementation|The model class .* is not (?:compatible|supported)|"
            r"Cannot find model module\. '(?P<name2>\w+)' is not a registered model"
        ),
        "This version does not know the model's architecture: {name}.",
        say(
            "update the server (and its transformers) to a version that lists the architecture, or choose another server; check `architectures` in config.json"
        ),
    ),
    Rule(
        "auth",
        Cause.LICENSE_OR_AUTH,
        pattern(
            r"GatedRepoError|(?:trying to access|Cannot access) (?:a )?gated repo|Access to model \S+ is restricted|You (?:must|need to) (?:be authenticated|have access)|"
            r"(?:401|403) Client Error|is not authorized|[Ii]nvalid (?:user ?name or password|token)|awaiting a review from the repo authors"
        ),
        "The hub refused the model: a licence to accept, or a token that is missing.",
        say(
            "accept the licence on the model's page, then `hf auth login` or HF_TOKEN=…; or name a folder that is already downloaded"
        ),
        excludes=(Need(pattern(r"Repository Not Found|not a valid model identifier"), "block"),),
    ),
    Rule(
        "disk_full",
        Cause.CHECKPOINT_MISSING,
        pattern(
            r"Not enough free disk space to download|No space left on device.*(?:huggingface|/hub/|blobs)|(?:huggingface|/hub/|blobs).*No space left on device"
        ),
        "The download did not fit the disk, so the checkpoint is not whole.",
        say("free the disk of HF_HOME, or set HF_HOME to a larger one, and start again: the download resumes"),
    ),
    Rule(
        "trust_remote_code",
        Cause.UNSUPPORTED_ARCHITECTURE,
        pattern(
            r"requires you to execute the (?:configuration|modeling|tokenizer) file|contains custom code which must be executed|option `?trust_remote_code=True`?"
        ),
        "The model brings its own code, which the server does not run unasked.",
        say(
            "read the model's code, then pass --trust-remote-code; or update to a version that has the architecture built in"
        ),
    ),
)
