"""The numbers a start-up log carries: pools with their tokens and bytes, and the settings they came from.

The patterns are data, one table a server; each was read off a log in tests/data. Lines that start with ``#`` at the
head of a file are a collector's notes and are not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.sizes import GB, GIB

__all__ = ["Figures", "LoggedPool", "read_figures"]


@dataclass(frozen=True, slots=True)
class LoggedPool:
    """One pool as the log states it.

    Args:
        name: ``device``, ``device_window``, ``host``, ``needed``: what one request of full length would need.
        line: its line number in the file, from 1.
        slack_bytes: how far the printed size may be off (half its last digit).
        dtype: of its values, where the line says.
    """

    name: str
    tokens: int
    size_bytes: int
    slack_bytes: int
    line: int
    dtype: str | None = None


@dataclass(slots=True)
class Figures:
    """Everything read from one log."""

    server: str = "unknown"
    pools: list[LoggedPool] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """model, tp, dp, page_size, kv_dtype, cap_tokens, hicache_size, length, overrides."""
    budget_bytes: int | None = None
    """vLLM: what the worker with the least memory gives the KV cache."""
    budget_slack: int = 0
    index_bytes: int | None = None
    """SGLang: host bytes of the sparse-attention index."""
    draft_layers: int = 0


def read_figures(text: str) -> Figures:
    """Read a log. Terminal colours and progress bars do not matter."""
    found = Figures()
    head = True
    for number, line in enumerate(re.split(r"\n", text.replace("\r", " ")), 1):
        if head and (line.startswith("#") or not line.strip()):
            continue
        head = False
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        for server, literal, pattern, take in _PATTERNS:
            match = pattern.search(line) if literal in line else None
            if match:
                if server and found.server == "unknown":
                    found.server = server
                take(found, match, number)
    _finish(found)
    return found


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _slack(text: str, unit: int) -> int:
    """Half of the last printed digit, in bytes."""
    digits = len(text.partition(".")[2])
    return round(unit / 2 / float(f"1e{digits}"))


def _sglang_device(found: Figures, match: re.Match[str], line: int) -> None:
    tokens, rank = int(match["tokens"]), match["rank"] or ""
    sizes = [match["k"], match["v"]] if match["k"] else [match["kv"]]
    if match["dtype"]:
        found.settings.setdefault("kv_dtype", match["dtype"].removeprefix("torch."))
    if sizes[0] is None:
        return
    seen = found.settings.setdefault("_device_lines", {})
    seen.setdefault(rank, []).append(
        LoggedPool(
            "device",
            tokens,
            round(sum(_number(size) for size in sizes) * GIB),
            sum(_slack(size, GIB) for size in sizes),
            line,
            match["dtype"],
        )
    )


def _sglang_host(found: Figures, match: re.Match[str], line: int) -> None:
    if match["layers"]:
        found.draft_layers = int(match["draft"])
        found.settings["packed_layers"] = int(match["layers"])
    if any(pool.name == "host" for pool in found.pools):
        return  # another rank's, or the draft's
    size = match["size"]
    found.pools.append(LoggedPool("host", int(match["tokens"]), round(_number(size) * GB), _slack(size, GB), line))


def _sglang_index(found: Figures, match: re.Match[str], line: int) -> None:
    found.index_bytes = found.index_bytes or round(_number(match["size"]) * GB)


def _sglang_args(found: Figures, match: re.Match[str], line: int) -> None:
    wanted = {
        "model_path": "model",
        "tp_size": "tp",
        "dp_size": "dp",
        "page_size": "page_size",
        "kv_cache_dtype": "kv_dtype",
        "max_total_tokens": "cap_tokens",
        "hicache_size": "hicache_size",
        "enable_dp_attention": "dp_attention",
    }
    for name, key in wanted.items():
        value = re.search(rf"['\"]?\b{name}['\"]?\s*[:=]\s*('[^']*'|\"[^\"]*\"|[\w.]+)", match["args"])
        if value and value[1] not in ("None", "'auto'"):
            found.settings.setdefault(key, _literal(value[1]))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _vllm_budget(found: Figures, match: re.Match[str], line: int) -> None:
    size = round(_number(match["size"]) * GIB)
    if found.budget_bytes is None or size < found.budget_bytes:
        found.budget_bytes, found.budget_slack = size, _slack(match["size"], GIB)


def _vllm_tokens(found: Figures, match: re.Match[str], line: int) -> None:
    found.settings["device"] = match["device"].lower()
    found.settings.setdefault("tokens", (int(_number(match["tokens"])), line))


def _vllm_blocks(found: Figures, match: re.Match[str], line: int) -> None:
    found.settings.setdefault("tokens", (int(match["blocks"]) * 16, line))


def _vllm_length(found: Figures, match: re.Match[str], line: int) -> None:
    found.settings.setdefault("length", int(_number(match["length"])))


def _vllm_needed(found: Figures, match: re.Match[str], line: int) -> None:
    if any(pool.name == "needed" for pool in found.pools):
        return
    size = match["size"]
    tokens = int(_number(match["length"]))
    found.pools.append(LoggedPool("needed", tokens, round(_number(size) * GIB), _slack(size, GIB), line))


def _vllm_args(found: Figures, match: re.Match[str], line: int) -> None:
    values = _literal(match["args"])
    if not isinstance(values, Mapping):
        return
    keys = {"model": "model", "tensor_parallel_size": "tp", "block_size": "page_size", "kv_cache_dtype": "kv_dtype"}
    for name, key in (*keys.items(), ("hf_overrides", "overrides")):
        if values.get(name) not in (None, "auto"):
            found.settings.setdefault(key, values[name])


def _vllm_config(found: Figures, match: re.Match[str], line: int) -> None:
    for name, key in (("model", "model"), ("tensor_parallel_size", "tp"), ("kv_cache_dtype", "kv_dtype")):
        value = re.search(rf"\b{name}=('[^']*'|[\w./-]+)", match["args"])
        if value and value[1] != "auto":
            found.settings.setdefault(key, _literal(value[1]))


def _mark(found: Figures, match: re.Match[str], line: int) -> None:
    """A line that only tells whose log it is."""


_Taker = Callable[[Figures, re.Match[str], int], None]
_SIZE = r"[\d,]+(?:\.\d+)?"
# server, a text every matching line holds (a quick look before the pattern), the pattern, what to do with it
_PATTERNS: tuple[tuple[str, str, re.Pattern[str], _Taker], ...] = (
    (
        "sglang",
        "KV Cache is allocated",
        re.compile(
            r"^(?:\[[^\]]*?(?P<rank>(?:DP\d+ )?TP\d+[^\]]*)\])?.*?KV Cache is allocated\."
            r"(?: dtype: (?P<dtype>[\w.]+),)? #tokens: (?P<tokens>\d+)"
            rf"(?:, K size: (?P<k>{_SIZE}) GB, V size: (?P<v>{_SIZE}) GB|, KV size: (?P<kv>{_SIZE}) GB)?"
        ),
        _sglang_device,
    ),
    (
        "sglang",
        "hierarchical KV host pool",
        re.compile(
            rf"Allocating (?:kv )?hierarchical KV host pool: (?P<tokens>\d+) tokens, (?P<size>{_SIZE}) GB host memory"
            r"(?:, packed MTP KV layers: target_layers=\d+, draft_layers=(?P<draft>\d+), total_layers=(?P<layers>\d+))?"
        ),
        _sglang_host,
    ),
    (
        "sglang",
        "DSA indexer",
        re.compile(rf"Allocating (?P<size>{_SIZE}) GB host memory for DSA indexer"),
        _sglang_index,
    ),
    ("sglang", "server_args=", re.compile(r"server_args=(?:ServerArgs\()?(?P<args>.*)"), _sglang_args),
    ("sglang", "", re.compile(r"max_total_num_tokens=\d+|The server is fired up"), _mark),
    ("vllm", "KV", re.compile(rf"Available KV cache memory: (?P<size>{_SIZE}) GiB"), _vllm_budget),
    (
        "vllm",
        "KV",
        re.compile(rf"(?:Explicitly|Auto) set \((?P<size>{_SIZE})/{_SIZE}\) GiB for KV cache"),
        _vllm_budget,
    ),
    ("vllm", "KV", re.compile(rf"memory reserved for KV Cache is (?P<size>{_SIZE})GiB"), _vllm_budget),
    (
        "vllm",
        "KV cache size",
        re.compile(r"(?P<device>GPU|CPU|XPU|TPU) KV cache size: (?P<tokens>[\d,]+) tokens"),
        _vllm_tokens,
    ),
    ("vllm", "blocks:", re.compile(r"# (?:cuda|rocm|GPU|gpu) blocks: (?P<blocks>\d+)"), _vllm_blocks),
    (
        "vllm",
        "Maximum concurrency",
        re.compile(r"Maximum concurrency for (?P<length>[\d,]+) tokens per request"),
        _vllm_length,
    ),
    (
        "vllm",
        "KV cache is needed",
        re.compile(rf"max seq len \((?P<length>[\d,]+)\), \((?P<size>{_SIZE}) GiB KV cache is needed"),
        _vllm_needed,
    ),
    ("vllm", "non-default args", re.compile(r"non-default args: (?P<args>\{.*\})"), _vllm_args),
    (
        "vllm",
        "LLM engine",
        re.compile(r"Initializing a V\d LLM engine \([^)]*\) with config: (?P<args>.*)"),
        _vllm_config,
    ),
    ("vllm", "", re.compile(r"\((?:EngineCore|APIServer|Worker)[^)]*pid=\d+\)|vllm\.entrypoints"), _mark),
)


def _finish(found: Figures) -> None:
    """Ranks that say the same become one pool; vLLM's budget and tokens become the device pool."""
    by_rank: dict[str, list[LoggedPool]] = found.settings.pop("_device_lines", {})
    fullest: list[LoggedPool] = []
    for lines in by_rank.values():
        fullest = lines if len(lines) > len(fullest) else fullest
    found.pools[:0] = fullest
    tokens = found.settings.pop("tokens", None)
    if tokens is not None and found.budget_bytes is not None:
        pool = LoggedPool("device", tokens[0], found.budget_bytes, found.budget_slack, tokens[1])
        found.pools.insert(0, pool)
