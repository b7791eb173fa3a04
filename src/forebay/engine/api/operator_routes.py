"""Routes for people and programs that run the server: health, metrics, settings, the cache."""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from forebay.engine.api.errors import ApiError, unavailable
from forebay.engine.api.http.endpoint import ApiKey, Endpoint, Handler
from forebay.engine.api.http.json_response import JSONBody
from forebay.engine.api.service import Service
from forebay.engine.api.status import server_info, status_json

__all__ = ["routes"]

_OPEN_PATHS = ("/", "/health", "/metrics")
"""Answered without the API key: they tell how the server is, not what it does for whom."""
_TIERS = ("device", "host", "disk")


class _Operator:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    async def index(self, request: Request) -> Response:
        return HTMLResponse(self._page)

    async def health(self, request: Request) -> Response:
        status, body = self._service.state.health()
        return JSONBody(body, status)

    async def health_generate(self, request: Request) -> Response:
        self._service.check_open()
        seconds = await self._service.probe()
        return JSONBody({"status": "ok", "tokens": 1, "seconds": round(seconds, 6)})

    async def info(self, request: Request) -> Response:
        return JSONBody(server_info(self._service, await self._service.stats()))

    async def metrics(self, request: Request) -> Response:
        stats = await self._service.stats()
        body = self._service.metrics.render(stats.get("cache", {}))
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        return JSONBody(status_json(self._service, await self._service.stats()))

    async def cache(self, request: Request) -> Response:
        self._service.check_open()
        return JSONBody(await self._call("cache"))

    async def flush(self, request: Request) -> Response:
        self._service.check_open()
        tier = request.query_params.get("tier")
        if tier is not None and tier not in _TIERS:
            raise ApiError(f"'tier' must be one of {', '.join(_TIERS)}, not {tier!r}.", param="tier")
        began = time.perf_counter()
        result = await self._call("flush", tier)
        return JSONBody({**result, "seconds": round(time.perf_counter() - began, 6)})

    async def _call(self, method: str, tier: str | None = None) -> dict[str, Any]:
        try:
            return await self._service.engine.call(method, tier=tier)
        except TimeoutError as error:
            raise unavailable("The engine did not answer within 30 s.", "engine_busy") from error


def routes(service: Service, key: ApiKey) -> list[Route]:
    """The routes; all but ``_OPEN_PATHS`` need the key, where there is one."""
    operator = _Operator(service)

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, Endpoint(handler, service, key=None if path in _OPEN_PATHS else key), methods=[method])

    return [
        route("/", operator.index),
        route("/health", operator.health),
        route("/health_generate", operator.health_generate),
        route("/server_info", operator.info),
        route("/metrics", operator.metrics),
        route("/status", operator.status),
        route("/cache", operator.cache),
        route("/flush_cache", operator.flush, "POST"),
    ]
