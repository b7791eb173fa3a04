"""SGLang's log. Messages carry no level; a handled failure looks like a fatal one but for what follows it.

Stages and pools: read from logs of 0.5.23 (CPU, tensor parallel 1 and 2) and from lines of 0.3 to 0.5 on GPUs; the
order differs from other servers: graphs are captured before the host pool is allocated (``scheduler.py``: the model
worker first, then ``build_kv_cache``).
"""

from __future__ import annotations

import re

from forebay.servers.log_patterns.common import COMMON_ERRORS, progress
from forebay.servers.log_patterns.pattern import ErrorMark, Grammar, SettingPattern, Stage, StagePattern

__all__ = ["SGLANG"]

_STAGES = (
    StagePattern(Stage.LAUNCHED, re.compile(r"^(?:server_args=|Init (?:torch distributed|parallel) (?:begin|ends))")),
    StagePattern(Stage.LOADING, progress(r"(?:Loading|Multi-thread loading)\b.*\bshards")),
    StagePattern(Stage.LOADING, re.compile(r"^Load weight begin\b")),
    StagePattern(Stage.LOADING, re.compile(r"^Load weight end\b"), complete=True),
    StagePattern(Stage.DEVICE_POOL, re.compile(r"^(?:KV|Mamba) Cache is allocated\b|^Memory pool end\b")),
    StagePattern(Stage.CAPTURING, progress(r"Capturing (?:batches|num tokens)\b")),
    StagePattern(Stage.CAPTURING, re.compile(r"^Capture .*(?:cuda|CUDA) [gG]raph end\b"), complete=True),
    StagePattern(Stage.CAPTURING, re.compile(r"^Capture .*(?:cuda|CUDA) [gG]raph begin\b")),
    StagePattern(Stage.HOST_POOL, re.compile(r"^Allocating .*\b(?:host pool|host memory)\b")),
    StagePattern(Stage.HOST_POOL, re.compile(r"^Tree cache initialized: .*hicache_attached=True"), complete=True),
    StagePattern(
        Stage.WARMING_UP, re.compile(r"^(?:Started server process|Application startup complete|Uvicorn running on)")
    ),
    StagePattern(Stage.WARMING_UP, re.compile(r"^(?:Start of|End of) (?:pd )?disaggregation warmup", re.IGNORECASE)),
    StagePattern(Stage.SERVING, re.compile(r"^The server is fired up and ready to roll!")),
)

_ERRORS = (
    ErrorMark(re.compile(r"^\[Errno \d+\] error while attempting to bind on address"), ("ERROR",), binding=True),
    ErrorMark(
        re.compile(
            r"^(?:Scheduler|DataParallelController|DetokenizerManager|TokenizerManager|Multi\w+Router) hit an exception"
        )
    ),
    ErrorMark(re.compile(r"^Received sigquit from a child process")),
    ErrorMark(re.compile(r"^SIGQUIT received\..*child failed")),
    ErrorMark(re.compile(r"scheduler (?:died during initialization|is dead)")),
    ErrorMark(re.compile(r"^Subprocess \S+ \(pid=\d+\) (?:crashed|exited)")),
    ErrorMark(re.compile(r"^Initialization failed\. warmup error")),
    *COMMON_ERRORS,
)

_SETTINGS = (
    SettingPattern(
        re.compile(
            r"max_total_num_tokens=(?P<device_pool_tokens>\d+), chunked_prefill_size=(?P<chunked_prefill_size>-?\d+)"
            r"(?:, max_prefill_tokens=\d+)?(?:, max_running_requests=(?P<max_running_count>\d+))?"
            r"(?:, context_len=(?P<context_tokens>\d+))?"
        ),
        per_rank=True,
    ),
    SettingPattern(
        re.compile(r"^KV Cache is allocated\.(?: dtype: (?P<kv_dtype>[\w.]+),)? #tokens: (?P<kv_cache_tokens>\d+)"),
        per_rank=True,
    ),
    SettingPattern(
        re.compile(
            r"^Allocating \w* ?hierarchical KV host pool: "
            r"(?P<host_pool_tokens>\d+) tokens, (?P<host_pool_gb>[\d.]+) GB host memory"
        ),
        per_rank=True,
    ),
    SettingPattern(
        re.compile(r"^Allocating (?P<host_pool_gb>[\d.]+) GB host memory for hierarchical KV cache"), per_rank=True
    ),
    SettingPattern(re.compile(r"^Load weight end\..*\bmem usage=(?P<weights_gib>-?[\d.]+) GB"), per_rank=True),
    SettingPattern(
        re.compile(r"^Tree cache initialized: .*impl=(?P<tree_cache>\w+).*hicache_attached=(?P<hicache_attached>\w+)")
    ),
    SettingPattern(re.compile(r"^Creating (?:dynamic )?storage backend '(?P<storage_backend>[\w-]+)'")),
    SettingPattern(
        re.compile(r"^(?P<layout_rewritten>Page first layout is not supported with direct IO backend, switching to .+)")
    ),
    SettingPattern(re.compile(r"^(?P<radix_cache_forced_off>KV cache is forced as chunk cache for decode server)")),
    SettingPattern(re.compile(r"^Uvicorn running on (?P<address>http\S+)")),
)

SGLANG = Grammar(
    server="sglang",
    versions="0.5.23 captured; lines of 0.3 to 0.5.18",
    order=(
        Stage.PREFLIGHT,
        Stage.LAUNCHED,
        Stage.LOADING,
        Stage.DEVICE_POOL,
        Stage.CAPTURING,
        Stage.HOST_POOL,
        Stage.WARMING_UP,
        Stage.SERVING,
    ),
    stages=_STAGES,
    errors=_ERRORS,
    settings=_SETTINGS,
)
