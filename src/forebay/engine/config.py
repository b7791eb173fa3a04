"""What the engine was asked for: one frozen record a room, parsed once by the command line and checked here.

The worker processes get all but ``HttpConfig`` (it holds the API key) as one JSON line on their standard input.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from forebay.engine.cache.config import CacheConfig
from forebay.errors import UsageError

__all__ = [
    "EngineConfig",
    "HttpConfig",
    "ModelConfig",
    "ProcessConfig",
    "SchedulerConfig",
]

DType = Literal["auto", "bfloat16", "float32"]
LogFormat = Literal["text", "json"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it computes."""

    model: str
    """A Hugging Face folder, a GGUF file, ``smollm2`` or a hub id."""
    dtype: DType = "auto"
    context_length: int | None = None
    """Prompt and output tokens of one request together; None: what the model says, if the device pool can hold it."""
    threads: int | None = None
    """Threads of matrix products and kernels, of all ranks together; None: the cores this process may use."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests become batches."""

    max_running: int = 64
    """Sequences that may hold pages at once."""
    max_queue: int = 256
    """Sequences that may wait beyond those; one more is answered 429."""
    chunk_size: int = 2048
    """Most prompt tokens computed in one step; measured step times set how many it is (``scheduler/budget.py``)."""
    step_target_s: float = 0.15
    """While others decode, a step's prompt tokens are cut so that the measured step time stays near this."""


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The processes and how they end."""

    tp: int = 1
    rank_timeout_s: float = 10.0
    """A rank with no heartbeat and no CPU time for this long is hung."""
    drain_s: float = 30.0
    """How long SIGTERM waits for running requests."""
    log_format: LogFormat = "text"


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The API server's own settings."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    """The name clients use; None: MODEL as given."""
    max_connections: int = 4096
    """Connections at once; fewer where the process may not open as many files."""
    client_timeout_s: float = 30.0
    """How long a client may take to send a request's head, or leave a part of its answer unread."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `forebay serve` was asked for."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    process: ProcessConfig = ProcessConfig()
    http: HttpConfig = HttpConfig()

    @property
    def served_name(self) -> str:
        return self.http.served_model_name or self.model.model

    def check(self) -> EngineConfig:
        """Refuse values that cannot work, naming the option; returns itself.

        Raises:
            UsageError: with the option, the value and what is allowed.
        """
        self.cache.check()
        _at_least("--max-running", self.scheduler.max_running, 1)
        _at_least("--max-queue", self.scheduler.max_queue, 0)
        _at_least("--chunk-size", self.scheduler.chunk_size, 16)
        _at_least("--tp", self.process.tp, 1)
        _at_least("--drain-seconds", self.process.drain_s, 0)
        _at_least("--rank-timeout", self.process.rank_timeout_s, 1)
        _at_least("--max-connections", self.http.max_connections, 1)
        _at_least("--client-timeout", self.http.client_timeout_s, 1)
        if self.model.threads is not None:
            _at_least("--threads", self.model.threads, 1)
        if self.model.context_length is not None:
            _at_least("--context-length", self.model.context_length, 2)
        if not 0 <= self.http.port <= 65535:
            raise UsageError(f"--port: {self.http.port} is not a port", fix="use 0 (any free port) to 65535")
        if self.http.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", self.http.api_key):
            raise UsageError("--api-key: only printable ASCII without spaces can travel in an Authorization header")
        return self


def _at_least(option: str, value: float, least: float) -> None:
    if value < least:
        raise UsageError(f"{option}: {value} is too small", fix=f"use {least} or more")
