"""The servers' rules that changed between versions, as data: (first version it is known in, value), oldest first.

Read in source: SGLang 0.5.23 and vLLM 0.32.0. The graph estimate's move into the budget (vLLM 0.21) is from its log
message. For the others the exact version of the change is not known: an older version gets the older rule, which was
read in logs and release notes of the time, and `forebay plan` says which version it planned for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["NEWEST", "at_least", "rule", "version_key"]

NEWEST = {"embedded": "0.1.0", "sglang": "0.5.23", "vllm": "0.32.0"}
"""The newest version whose rules were read in source."""

_RULES: Mapping[str, tuple[tuple[str, Any], ...]] = {
    # auto-sizing of the host tier from free memory (mem_cache/hicache_auto_size.py); before: the ratio as given
    "sglang.hicache_autosize": (("0", False), ("0.5.23", True)),
    # the check of a host pool against its rank's share of free memory; before: against all of it
    "sglang.host_budget_per_rank": (("0", False), ("0.5.23", True)),
    # gpu_memory_utilization's default (config/cache.py)
    "vllm.gpu_memory_utilization": (("0", 0.9), ("0.32", 0.92)),
    # the CUDA graph estimate counts inside the budget (gpu_worker.py, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS)
    "vllm.graphs_inside_budget": (("0", False), ("0.21", True)),
    # replicated KV is offloaded once for all ranks (v1/kv_offload/config.py: replicated_layout)
    "vllm.offload_deduplicates_latent": (("0", False), ("0.32", True)),
}


def rule(name: str, version: str) -> Any:
    """The value of ``name`` (``server.rule``) in ``version``."""
    value: Any = None
    for since, setting in _RULES[name]:
        if version_key(version) >= version_key(since):
            value = setting
    return value


def at_least(version: str, since: str) -> bool:
    """Whether ``version`` is ``since`` or newer; development suffixes are ignored."""
    return version_key(version) >= version_key(since)


def version_key(version: str) -> tuple[int, ...]:
    """Comparable numbers of a version (``0.5.23.post1`` -> 0, 5, 23)."""
    match = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else (0,)
