"""From a model folder to a rank that can execute steps: sizes first, then weights, then pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from forebay.engine.cache.cache_factory import build_cache, follow_cache
from forebay.engine.cache.config import TierConfig
from forebay.engine.cache.host.pool_check import require_host_pool
from forebay.engine.cache.interface import PrefixCacheProtocol
from forebay.engine.cache.transfer.copier import CopyRuns, native_copy_runs
from forebay.engine.cache.transfer.rank_transfers import RankTransfers
from forebay.engine.checkpoint.fingerprint import weights_fingerprint
from forebay.engine.distributed.collectives import Comm
from forebay.engine.events import EventLog
from forebay.engine.kernels import load_backend
from forebay.engine.kernels.interface import KernelBackend
from forebay.engine.kernels.native_backend import NativeBackend
from forebay.engine.model_executor.load_model import LoadedModel, inspect, load
from forebay.engine.model_executor.model_runner import ModelRunner
from forebay.engine.model_executor.step import Runner, SeqStep, StepBatch
from forebay.engine.sampling_params import SamplingParams
from forebay.engine.worker.engine import Engine
from forebay.engine.worker.resource_limits import (
    context_length,
    describe_pools,
    device_pages,
    threads_per_rank,
    tier_config,
)
from forebay.engine.worker.start import WorkerStart
from forebay.engine.worker.tensor_parallel import RankGroup, TPLeaderRunner
from forebay.kv.spec import KVSpec

__all__ = ["Rank", "build_engine", "build_rank"]

Report = Callable[[str, float | None], None]


@dataclass(slots=True)
class Rank:
    """One rank with its weights and its device pool, warm."""

    start: WorkerStart
    loaded: LoadedModel
    runner: ModelRunner
    spec: KVSpec
    pages: int
    tiers: TierConfig

    def follow_transfers(self, region_path: str) -> RankTransfers:
        """The transfers of a rank above 0 over rank 0's host region."""
        return follow_cache(
            self.spec,
            self.tiers,
            self.start.rank,
            self.runner.pool,
            region_path,
            copy_runs=copy_runs(self.loaded.backend),
        )


def build_rank(start: WorkerStart, folder: Path, report: Report, log: EventLog, comm: Comm | None = None) -> Rank:
    """Load one rank and run it once. Among several, all do this at the same time:
    loading and warming up are collective.

    Args:
        start: what was asked for.
        folder: the model.
        report: told stage and progress.
        log: events.
        comm: the other ranks.

    Raises:
        UsageError: a model or an option that cannot work.
        RefusedError: it does not fit, with the numbers.
    """
    threads = threads_per_rank(start)
    torch.set_num_threads(threads)
    tp = start.process.tp
    inspected = inspect(folder, dtype=start.model.dtype, tp=tp)
    spec = inspected.kv_spec(start.cache.page_size)
    pages = device_pages(spec, tp, start.cache.device_bytes, start.available_bytes)
    context = context_length(start, inspected, pages * spec.page_size, log)
    backend = load_backend(threads=threads, progress=lambda line: log.info("kernels", message=line))
    fingerprint = ""
    if start.rank == 0:
        if start.cache.host_bytes:
            require_host_pool(start.cache.host_bytes)
        if start.cache.disk_dir is not None:
            fingerprint = weights_fingerprint(folder, str(inspected.dtype))
    loaded = load(inspected, backend, comm=comm, progress=lambda done, total: report("loading", done / max(total, 1)))
    report("device pool", 0.0)
    runner = ModelRunner(
        loaded,
        [pages] * len(spec.groups),
        spec.page_size,
        context_length=context,
        max_seqs=start.scheduler.max_running,
    )
    report("device pool", 1.0)
    return Rank(start, loaded, runner, spec, pages, tier_config(start, spec, pages, fingerprint))


def build_engine(rank: Rank, group: RankGroup | None, report: Report, log: EventLog) -> Engine:
    """Rank 0's engine: the cache with its tiers over a loaded rank.

    Args:
        rank: rank 0, loaded.
        group: the other ranks, if there are any.
        report: told stage and progress.
        log: events.

    Raises:
        RefusedError: a tier does not fit, or is in use by another server.
    """
    start = rank.start
    if start.cache.host_bytes:
        report("host pool", 0.0)
    cache = build_cache(
        rank.spec,
        rank.tiers,
        rank.runner.pool,
        copy_runs=copy_runs(rank.loaded.backend),
        progress=lambda done, total, rate: report("host pool", done / max(total, 1)),
        broadcast=None if group is None else group.broadcast,
        collect=tuple if group is None else group.collect,
    )
    runner: Runner = rank.runner
    if group is not None:
        group.attach(None if cache.region is None else cache.region.path)
        runner = TPLeaderRunner(rank.runner, group)
    report("warming up", 0.0)
    warm_up(runner, rank.spec)
    info = _info(rank)
    log.info("pools", **info["pools"])
    return Engine(
        cast(PrefixCacheProtocol, cache), runner, rank.spec, start.scheduler, info, cache.snapshot, cache.close_tiers
    )


def copy_runs(backend: KernelBackend) -> CopyRuns | None:
    """The native library's copy for the transfers; None: numpy's."""
    return native_copy_runs(backend.copy_runs) if isinstance(backend, NativeBackend) else None


def warm_up(runner: Runner, spec: KVSpec) -> None:
    """Run a prompt and a decoding step once, so that the first request does not pay for first calls.

    The page it writes belongs to nobody yet.
    """
    count = min(32, spec.page_size)
    tables = [np.zeros(1, dtype=np.int32) for _ in spec.groups]
    greedy = SamplingParams(temperature=0.0)
    for start, tokens in ((0, count - 1), (count - 1, 1)):
        if tokens:
            step = SeqStep(0, np.zeros(tokens, dtype=np.int32), start, tables, sample=True, sampling=greedy)
            runner.execute(StepBatch([step]))


def _info(rank: Rank) -> dict[str, Any]:
    """What /server_info says of the model, this rank and all together."""
    start, spec, inspected = rank.start, rank.spec, rank.loaded.inspected
    return {
        "context_length": rank.runner.context_length,
        "vocab_size": inspected.vocab_size,
        "dtype": str(inspected.dtype).removeprefix("torch."),
        "architecture": inspected.config.get("architectures", ["unknown"])[0],
        "threads_per_rank": threads_per_rank(start),
        "weight_bytes_per_rank": rank.loaded.weight_bytes,
        "kernels": rank.loaded.backend.info(),
        "page_size": spec.page_size,
        "kv_bytes_per_token": {
            "one_copy": spec.bytes_per_token,
            "per_rank": spec.bytes_per_token_per_rank(start.process.tp),
        },
        "pools": describe_pools(start, spec, rank.pages),
    }
