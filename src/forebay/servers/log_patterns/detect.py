"""Whose log is this: marks that only one server leaves, weighed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from forebay.servers.log_patterns.lines import LogLine

__all__ = ["detect_server", "server_marks"]

_DIALECTS = {"sglang": "sglang", "vllm": "vllm", "lmcache": "vllm", "embedded": "embedded"}
_DIALECT_WEIGHT = 3
_MARKS = (
    (
        "sglang",
        2,
        re.compile(
            r"\b(?:load_snapshot|tokenizer_manager|detokenizer_manager|flashinfer_backend|schedule_batch|cache_controller)\.py\b"
        ),
    ),
    (
        "sglang",
        5,
        re.compile(
            r"\bsglang/srt/|\bsglang::|\bsglang serve\b|sglang\.launch_server|\bsgl_kernel\b|\bSGLANG_[A-Z]|sgl_shm_mm_"
        ),
    ),
    (
        "sglang",
        5,
        re.compile(
            r"scheduler (?:died during initialization|is dead)|Received sigquit from a child|Scheduler hit an exception"
        ),
    ),
    ("sglang", 5, re.compile(r"--mem-fraction-static|hierarchical (?:cache|KV)|HiCache|hicache|max_total_num_tokens=")),
    ("sglang", 4, re.compile(r"host buffer is not pinned and device transfers may silently return stale data")),
    (
        "vllm",
        5,
        re.compile(
            r"\bvllm/v1/|site-packages/vllm/|vllm\.entrypoints|\bVLLM_[A-Z]|\bVLLM::|"
            r"vllm_offload_|\bvllm serve\b|^api_server\.py: error"
        ),
    ),
    (
        "vllm",
        5,
        re.compile(
            r"EngineCore|EngineDeadError|engine core proc|"
            r"WorkerProc |VllmConfig|\bLMCache\b|lmcache[./]|gpu_memory_utilization"
        ),
    ),
    (
        "vllm",
        3,
        re.compile(r"waiting for engines to send initial message|waiting for engine core processes|max_model_len"),
    ),
    ("embedded", 5, re.compile(r"\bforebay serve\b|forebay/engine/|\bforebay\.engine\b|^forebay: .+ \[[a-z_]+\]$")),
)


def server_marks(line: LogLine) -> Counter[str]:
    """What one line says about whose log it is: server -> weight."""
    weights: Counter[str] = Counter()
    dialect = _DIALECTS.get(line.dialect)
    if dialect:
        weights[dialect] += _DIALECT_WEIGHT
    for server, weight, pattern in _MARKS:
        if pattern.search(line.full):
            weights[server] += weight
    return weights


def detect_server(lines: Iterable[LogLine]) -> str:
    """``embedded``, ``sglang`` or ``vllm``, or ``unknown`` where the marks are missing or a tie."""
    total: Counter[str] = Counter()
    for line in lines:
        total.update(server_marks(line))
    ranked = total.most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return "unknown"
    return ranked[0][0]
