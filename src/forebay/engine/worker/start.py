"""What a worker process is told when it starts: one JSON line on its standard input."""

from __future__ import annotations

import signal

import msgspec

from forebay.engine.cache.config import CacheConfig
from forebay.engine.config import ModelConfig, ProcessConfig, SchedulerConfig
from forebay.engine.ipc.sockets import Endpoints

__all__ = ["STOP_SIGNALS", "WorkerStart", "ignore_stop_signals"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A worker starts with these blocked and then ignores them: the API server decides when it ends."""


def ignore_stop_signals() -> None:
    """Called first in a worker: ignore ``STOP_SIGNALS`` and unblock them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank is told."""

    rank: int
    endpoints: Endpoints
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    process: ProcessConfig
    available_bytes: int | None = None
    """Memory that could still be allocated when the server started, read once for all ranks; None: not known."""
    folder: str | None = None
    """The model's folder where it is known already (ranks above 0)."""
    comm_path: str | None = None
    """The ranks' shared memory (ranks above 0)."""
