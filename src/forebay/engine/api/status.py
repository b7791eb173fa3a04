"""/server_info and /status: asked, effective, and what goes on now."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from forebay import __version__
from forebay.engine.api.cache_metrics import tier_use
from forebay.engine.api.service import Service

__all__ = ["server_info", "status_json"]


def server_info(service: Service, stats: dict[str, Any]) -> dict[str, Any]:
    """What was asked for beside what is in effect; the API key is never shown."""
    config = service.config
    asked: dict[str, Any] = msgspec.to_builtins(config)
    asked["http"]["api_key"] = None if config.http.api_key is None else "***"
    effective = {
        "model": config.served_name,
        "tp": config.process.tp,
        "max_running": config.scheduler.max_running,
        "max_queue": config.scheduler.max_queue,
        "chunk_size": config.scheduler.chunk_size,
        "write_policy": config.cache.write_policy,
        "eviction": config.cache.eviction,
        "load": config.cache.load,
        **service.info,
    }
    return {
        "schema": 1,
        "server": "embedded",
        "version": __version__,
        "phase": service.state.phase.value,
        "asked": asked,
        "effective": effective,
        "start": _stages(service),
        "cache": stats.get("cache", {}),
    }


def status_json(service: Service, stats: dict[str, Any]) -> dict[str, Any]:
    """The numbers the page shows."""
    return {
        "schema": 1,
        "model": service.config.served_name,
        "version": __version__,
        "phase": service.state.phase.value,
        "stage": service.state.stage,
        "progress": service.state.progress,
        "uptime_s": round(time.time() - service.state.started_at, 1),
        "requests": stats.get("requests", {}),
        "http_requests": service.num_requests,
        "totals": service.metrics.totals(),
        "tiers": tier_use(stats.get("cache", {})),
        "pools": service.info.get("pools", {}),
        "start": _stages(service),
    }


def _stages(service: Service) -> list[dict[str, Any]]:
    """Each stage of the start with the seconds since launch at which it began."""
    history = service.state.history
    return [{"stage": stage, "began_s": round(at - history[0][1], 3)} for stage, at in history]
