"""From a model folder to an engine that can execute steps: sizes first, then weights, then pools."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from forebay.causes import Cause
from forebay.engine.cache.build import build_cache
from forebay.engine.cache.config import CacheConfig as TierConfig
from forebay.engine.cache.config import Eviction, LoadPolicy, WritePolicy
from forebay.engine.cache.host_limits import require_host_pool
from forebay.engine.cache.interface import PrefixCacheProtocol
from forebay.engine.config import SchedulerConfig
from forebay.engine.events import EventLog
from forebay.engine.runtime.fingerprint import weights_fingerprint
from forebay.engine.runtime.kernels import load_backend
from forebay.engine.runtime.kernels.interface import KernelBackend
from forebay.engine.runtime.loader import Inspected, inspect, load
from forebay.engine.runtime.runner import ModelRunner
from forebay.engine.runtime.step import Runner, SamplingParams, SeqStep, StepBatch
from forebay.errors import RefusedError
from forebay.planning import embedded
from forebay.planning.kv_spec import KVSpec
from forebay.sizes import format_size

if TYPE_CHECKING:
    from forebay.engine.runtime.worker import WorkerStart

__all__ = ["Engine", "build_engine", "device_pages"]

Report = Callable[[str, float | None], None]


@dataclass(slots=True)
class Engine:
    """What rank 0's loop works with."""

    cache: PrefixCacheProtocol
    runner: Runner
    spec: KVSpec
    scheduler_config: SchedulerConfig
    info: dict[str, Any]
    snapshot: Callable[[], dict[str, Any]]
    """The cache's picture for GET /cache."""
    close: Callable[[], None]
    """Finishes transfers and gives the tiers back."""


def build_engine(start: WorkerStart, folder: Path, report: Report, log: EventLog) -> Engine:
    """Load one rank.

    Raises:
        UsageError: a model or an option that cannot work.
        RefusedError: it does not fit, with the numbers.
    """
    threads = _threads(start)
    torch.set_num_threads(threads)
    tp = start.process.tp
    inspected = inspect(folder, dtype=start.model.dtype, tp=tp)
    spec = inspected.kv_spec(start.cache.page_size)
    pages = device_pages(spec, tp, start.cache.device_bytes, start.machine.available_bytes)
    context = _context_length(start, inspected, pages * spec.page_size, log)
    backend = load_backend(threads=threads, progress=lambda line: log.info("kernels", message=line))
    if start.cache.host_bytes:
        require_host_pool(start.cache.host_bytes)
    fingerprint = weights_fingerprint(folder, str(inspected.dtype)) if start.cache.disk_dir is not None else ""
    loaded = load(inspected, backend, progress=lambda done, total: report("loading", done / max(total, 1)))
    report("device pool", 0.0)
    runner = ModelRunner(
        loaded,
        [pages] * len(spec.groups),
        spec.page_size,
        context_length=context,
        max_seqs=start.scheduler.max_running,
    )
    report("device pool", 1.0)
    if start.cache.host_bytes:
        report("host pool", 0.0)
    cache = build_cache(
        spec,
        _tier_config(start, spec, pages, fingerprint),
        runner.pool,
        progress=lambda done, total, rate: report("host pool", done / max(total, 1)),
    )
    report("warming up", 0.0)
    _warm_up(runner, spec)
    info = _info(start, inspected, spec, pages, context, threads, loaded.weight_bytes, backend)
    log.info("pools", **{key: value for key, value in info["pools"].items() if not isinstance(value, dict)})
    return Engine(
        cast(PrefixCacheProtocol, cache), runner, spec, start.scheduler, info, cache.snapshot, cache.close_tiers
    )


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
    page_bytes = embedded.device_page_bytes(spec, tp)
    if asked_bytes is None:
        asked_bytes = embedded.default_device_bytes(available_bytes)
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
    return embedded.device_pages(spec, tp, asked_bytes)


def _context_length(start: WorkerStart, inspected: Inspected, pool_tokens: int, log: EventLog) -> int:
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


def _threads(start: WorkerStart) -> int:
    """This rank's share of the threads."""
    total = start.model.threads or len(os.sched_getaffinity(0))
    return max(1, total // start.process.tp)


def _tier_config(start: WorkerStart, spec: KVSpec, pages: int, fingerprint: str) -> TierConfig:
    asked = start.cache
    return TierConfig(
        device_pages=(pages,) * len(spec.groups),
        host_bytes=asked.host_bytes,
        disk_dir=None if asked.disk_dir is None else Path(asked.disk_dir),
        disk_bytes=asked.disk_bytes,
        write_policy=WritePolicy(asked.write_policy),
        eviction=Eviction(asked.eviction),
        load=LoadPolicy(asked.load),
        fingerprint=fingerprint,
        tp=start.process.tp,
    )


def _warm_up(runner: Runner, spec: KVSpec) -> None:
    """Run a prompt and a decoding step once, so that the first request does not pay for first calls.

    The pages it writes belong to nobody yet.
    """
    count = min(32, spec.page_size)
    tables = [np.zeros(1, dtype=np.int32) for _ in spec.groups]
    greedy = SamplingParams(temperature=0.0)
    for start, tokens in ((0, count - 1), (count - 1, 1)):
        if tokens:
            step = SeqStep(0, np.zeros(tokens, dtype=np.int32), start, tables, sample=True, sampling=greedy)
            runner.execute(StepBatch([step]))


def _info(
    start: WorkerStart,
    inspected: Inspected,
    spec: KVSpec,
    pages: int,
    context: int,
    threads: int,
    weight_bytes: int,
    backend: KernelBackend,
) -> dict[str, Any]:
    """What /server_info says of this rank and of all together."""
    tp = start.process.tp
    device_tokens = pages * spec.page_size
    device_rank = embedded.device_bytes_per_rank(spec, tp, pages)
    host_pages = embedded.host_pages(spec, start.cache.host_bytes) if start.cache.host_bytes else (0,)
    host_bytes = embedded.host_region_bytes(spec, host_pages) if start.cache.host_bytes else 0
    return {
        "context_length": context,
        "vocab_size": inspected.vocab_size,
        "dtype": str(inspected.dtype).removeprefix("torch."),
        "architecture": inspected.config.get("architectures", ["unknown"])[0],
        "threads_per_rank": threads,
        "weight_bytes_per_rank": weight_bytes,
        "kernels": backend.info(),
        "page_size": spec.page_size,
        "kv_bytes_per_token": {"one_copy": spec.bytes_per_token, "per_rank": spec.bytes_per_token_per_rank(tp)},
        "pools": {
            "device_pool_tokens": device_tokens,
            "device_pool_bytes_per_rank": device_rank,
            "device_pool_bytes_total": device_rank * tp,
            "host_pool_tokens": host_pages[0] * spec.page_size,
            "host_pool_bytes_per_rank": host_bytes // tp,
            "host_pool_bytes_total": host_bytes,
            "disk_pool_tokens": start.cache.disk_bytes // spec.bytes_per_token,
            "disk_pool_bytes_total": start.cache.disk_bytes,
        },
    }
