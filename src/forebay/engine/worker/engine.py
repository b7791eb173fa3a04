"""The parts that rank 0's engine loop drives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.engine.cache.interface import PrefixCacheProtocol
from forebay.engine.config import SchedulerConfig
from forebay.engine.model_executor.step import Runner
from forebay.kv.spec import KVSpec

__all__ = ["Engine"]


@dataclass(slots=True)
class Engine:
    """The cache, the runner and the limits of one engine."""

    cache: PrefixCacheProtocol
    runner: Runner
    spec: KVSpec
    scheduler_config: SchedulerConfig
    info: dict[str, Any]
    snapshot: Callable[[], dict[str, Any]]
    """The cache's picture for GET /cache."""
    close: Callable[[], None]
    """Finishes transfers and gives the tiers back."""
