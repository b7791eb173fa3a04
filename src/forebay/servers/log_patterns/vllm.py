"""vLLM's log. Every message carries process, level and source; what carries none is uvicorn, tqdm, a library,
or a crash.

Stages: read from logs of 0.32.0 (CPU; eager, compiled, tensor parallel 1 to 3) and from GPU lines of 0.7 to 0.29.
Compilation and profiling size the device pool, so they are its first part (``core.py``: ``_initialize_kv_caches``).
"""

from __future__ import annotations

import re

from forebay.servers.log_patterns.common import BARE_EXCEPTION, COMMON_ERRORS, progress
from forebay.servers.log_patterns.pattern import ErrorMark, Grammar, SettingPattern, Stage, StagePattern

__all__ = ["VLLM"]

_STAGES = (
    StagePattern(Stage.LAUNCHED, re.compile(r"^non-default args: |^args: Namespace\(")),
    StagePattern(Stage.LAUNCHED, re.compile(r"^Resolved architecture: "), "reading the configuration"),
    StagePattern(Stage.LAUNCHED, re.compile(r"^Initializing an? (?:V\d )?LLM engine \("), "engine process up"),
    StagePattern(
        Stage.LAUNCHED, re.compile(r"^world_size=\d+ rank=\d+ .*distributed_init_method="), "worker process up"
    ),
    StagePattern(Stage.LOADING, progress(r"(?:Loading|Multi-thread loading)\b.*\bshards")),
    StagePattern(Stage.LOADING, re.compile(r"^(?:Starting to load|Loading) model \S")),
    StagePattern(
        Stage.LOADING,
        re.compile(r"^(?:Loading (?:model )?weights took|Model loading took|Loading model weights took) "),
        complete=True,
    ),
    StagePattern(Stage.DEVICE_POOL, re.compile(r"^Warming up model for the compilation"), "compiling"),
    StagePattern(
        Stage.DEVICE_POOL,
        re.compile(
            r"Dynamo bytecode transform time|^(?:\[\w+\] )?saved AOT compiled function|"
            r"[Cc]ompiling a graph for|torch\.compile (?:takes|took) "
        ),
        "compiling",
    ),
    StagePattern(
        Stage.DEVICE_POOL,
        re.compile(r"^(?:Available KV cache memory: |Memory profiling (?:takes|results))"),
        "profiling",
    ),
    StagePattern(
        Stage.DEVICE_POOL,
        re.compile(
            r"^\S.* KV cache size: [\d,]+ tokens|^# (?:GPU|CPU|cuda) blocks: |"
            r"^Explicitly set \([\d./]+\) GiB for KV cache"
        ),
    ),
    StagePattern(
        Stage.HOST_POOL, re.compile(r"^(?:Creating offloading spec with name|Creat\w+ mmap file /dev/shm/vllm_offload)")
    ),
    StagePattern(Stage.HOST_POOL, re.compile(r"^Creating v1 connector with name: .*(?:Offload|LMCache|Mooncake)")),
    StagePattern(Stage.CAPTURING, progress(r"(?:Capturing CUDA graphs?|Capturing CUDA graph shapes)\b")),
    StagePattern(Stage.CAPTURING, re.compile(r"^Capturing (?:the model|CUDA graphs?) for ")),
    StagePattern(Stage.CAPTURING, re.compile(r"^Graph capturing finished in "), complete=True),
    StagePattern(Stage.WARMING_UP, re.compile(r"^init engine \(profile, create kv cache, warmup model\) took ")),
    StagePattern(Stage.WARMING_UP, re.compile(r"^Starting vLLM (?:API )?server\b"), "opening the port"),
    StagePattern(
        Stage.WARMING_UP, re.compile(r"^(?:Started server process|Waiting for application startup)"), "opening the port"
    ),
    StagePattern(Stage.SERVING, re.compile(r"^Application startup complete\.")),
)

_ERRORS = (
    ErrorMark(re.compile(r"^WorkerProc (?:failed to start|hit an exception)\."), ("ERROR",)),
    ErrorMark(re.compile(r"^EngineCore (?:failed to start|encountered a fatal error)\."), ("ERROR",)),
    ErrorMark(re.compile(r"^(?:Ray)?Worker ?[Pp]roc \S+ died unexpectedly"), ("ERROR",)),
    ErrorMark(re.compile(r"^Worker \S+ pid \d+ died, exit code: ")),
    ErrorMark(re.compile(r"engine core exited unexpectedly|^Engine core proc \S+ died unexpectedly")),
    ErrorMark(re.compile(r"^(?:RuntimeError: )?Engine (?:core initialization failed|process failed to start)")),
    ErrorMark(re.compile(r"^Engine loop is not running|^Engine background task failed"), ("ERROR", "CRITICAL")),
    *COMMON_ERRORS,
)

_SETTINGS = (
    SettingPattern(re.compile(r"^Using max model len (?P<context_tokens>\d+)")),
    SettingPattern(
        re.compile(
            r"^(?:\w[\w +]* )?KV cache size: (?P<device_pool_tokens>[\d,]+) tokens"
            r"(?:, Maximum concurrency for (?P<context_tokens>[\d,]+) tokens per request: "
            r"(?P<max_concurrency>[\d.]+)x)?"
        )
    ),
    SettingPattern(
        re.compile(
            r"^Maximum concurrency for (?P<context_tokens>[\d,]+) tokens per request: (?P<max_concurrency>[\d.]+)x"
        )
    ),
    SettingPattern(re.compile(r"^Available KV cache memory: (?P<device_pool_gib>-?[\d.]+) GiB"), per_rank=True),
    SettingPattern(
        re.compile(r"^Explicitly set \((?P<device_pool_gib>[\d.]+)/[\d.]+\) GiB for KV cache"), per_rank=True
    ),
    SettingPattern(re.compile(r"^Model loading took (?P<weights_gib>[\d.]+) ?GiB"), per_rank=True),
    SettingPattern(re.compile(r"^Created mmap file (?P<host_pool_file>/dev/shm/\S+) \((?P<host_pool_gb>[\d.]+) GB\)")),
    SettingPattern(re.compile(r"enable_prefix_caching=(?P<prefix_caching>True|False)")),
    SettingPattern(re.compile(r"^Creating v1 connector with name: (?P<kv_connector>\w+)")),
    SettingPattern(
        re.compile(r"^(?P<hybrid_manager_off>Turning off hybrid kv cache manager because .+)", re.IGNORECASE)
    ),
    SettingPattern(re.compile(r"^Starting vLLM (?:API )?server(?: \d+)? on (?P<address>http\S+)")),
)

VLLM = Grammar(
    server="vllm",
    versions="0.32.0 captured; lines of 0.7 to 0.29",
    order=(
        Stage.PREFLIGHT,
        Stage.LAUNCHED,
        Stage.LOADING,
        Stage.DEVICE_POOL,
        Stage.HOST_POOL,
        Stage.CAPTURING,
        Stage.WARMING_UP,
        Stage.SERVING,
    ),
    stages=_STAGES,
    errors=(*_ERRORS, BARE_EXCEPTION),
    settings=_SETTINGS,
)
