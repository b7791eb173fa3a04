"""What one rank may use, from what was asked and what there is; and the same, described for /server_info."""

from __future__ import annotations

import os
from typing import Any

from forebay.causes import Cause
from forebay.engine.cache.config import TierConfig
from forebay.engine.events import EventLog
from forebay.engine.model_executor.load_model import Inspected
from forebay.engine.worker.start import WorkerStart
from forebay.errors import RefusedError
from forebay.kv import pool_sizes
from forebay.kv.spec import KVSpec
from forebay.sizes import format_size

__all__ = ["context_length", "describe_pools", "device_pages", "threads_per_rank", "tier_config"]


def device_pages(spec: KVSpec, tp: int, asked_bytes: int | None, available_bytes: int | None) -> int:
    """Pages of each layer group's device pool on one rank.

    Args:
        spec: the model's page.
        tp: ranks.
        asked_bytes: --device-cache, over all ranks; None: a default from the available memory.
        available_bytes: of this machine; None: unknown.

    Raises:
        RefusedError: not one page fits, or more was asked than the machine has.
    """
    page_bytes = pool_sizes.device_page_bytes(spec, tp)
    if asked_bytes is None:
        asked_bytes = pool_sizes.default_device_bytes(available_bytes)
    elif available_bytes is not None and asked_bytes > available_bytes:
        raise RefusedError(
            f"--device-cache {format_size(asked_bytes)} in total is more than the {format_size(available_bytes)} of "
            "memory that can be had here",
            fix=f"ask for at most {format_size(available_bytes * 9 // 10)}, less the weights",
            code=Cause.WEIGHTS_EXCEED_STATIC,
        )
    if asked_bytes < page_bytes:
        raise RefusedError(
            f"--device-cache {format_size(asked_bytes)} holds no page: one of {spec.page_size} tokens takes "
            f"{format_size(page_bytes)} over {tp} rank{'s' if tp > 1 else ''}",
            fix=f"ask for {format_size(page_bytes * 64)} or more",
            code=Cause.NO_WINDOW,
        )
    return pool_sizes.device_pages(spec, tp, asked_bytes)


def context_length(start: WorkerStart, inspected: Inspected, pool_tokens: int, log: EventLog) -> int:
    """Tokens of one request at most: what was asked, or what model and pool allow."""
    asked = start.model.context_length
    if asked is None:
        if pool_tokens < inspected.max_positions:
            log.warning(
                "context", asked=inspected.max_positions, context_length=pool_tokens, reason="device pool is smaller"
            )
        return min(inspected.max_positions, pool_tokens)
    if asked > inspected.max_positions:
        raise RefusedError(
            f"--context-length {asked} is beyond the model's {inspected.max_positions} positions",
            fix=f"ask for at most {inspected.max_positions}",
            code=Cause.CTX_TOO_LONG_FOR_MODEL,
        )
    if asked > pool_tokens:
        raise RefusedError(
            f"--context-length {asked} does not fit the device pool's {pool_tokens} tokens",
            fix=f"raise --device-cache, or ask for at most --context-length {pool_tokens}",
            code=Cause.CTX_TOO_LONG_FOR_KV,
        )
    return asked


def threads_per_rank(start: WorkerStart) -> int:
    """This rank's share of the threads."""
    total = start.model.threads or len(os.sched_getaffinity(0))
    return max(1, total // start.process.tp)


def tier_config(start: WorkerStart, spec: KVSpec, pages: int, fingerprint: str) -> TierConfig:
    """What the cache of this server is built from."""
    return TierConfig((pages,) * len(spec.groups), start.cache, fingerprint, start.process.tp)


def describe_pools(start: WorkerStart, spec: KVSpec, pages: int) -> dict[str, Any]:
    """Every pool in tokens and bytes, per rank and in total."""
    tp = start.process.tp
    device_rank = pool_sizes.device_bytes_per_rank(spec, tp, pages)
    host_pages = pool_sizes.host_pages(spec, start.cache.host_bytes) if start.cache.host_bytes else (0,)
    host_bytes = pool_sizes.host_region_bytes(spec, host_pages) if start.cache.host_bytes else 0
    return {
        "device_pool_tokens": pages * spec.page_size,
        "device_pool_bytes_per_rank": device_rank,
        "device_pool_bytes_total": device_rank * tp,
        "host_pool_tokens": host_pages[0] * spec.page_size,
        "host_pool_bytes_per_rank": host_bytes // tp,
        "host_pool_bytes_total": host_bytes,
        "disk_pool_tokens": start.cache.disk_bytes // spec.bytes_per_token,
        "disk_pool_bytes_total": start.cache.disk_bytes,
    }
