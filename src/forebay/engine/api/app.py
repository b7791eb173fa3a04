"""The HTTP routes. Handlers read a request, call the service and shape the answer; nothing else."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from forebay import __version__
from forebay.engine.api.errors import ApiError, unavailable
from forebay.engine.api.openai.requests import GenerationRequest, read_chat, read_completion
from forebay.engine.api.openai.responses import AnswerFormat, ChatFormat, CompletionFormat
from forebay.engine.api.openai.streaming import GenerationResponse
from forebay.engine.api.service import Service
from forebay.engine.api.status import server_info, status_json

__all__ = ["build_app"]

_JSON = msgspec.json.Encoder()
_MOST_BODY_BYTES = 64 * 2**20
_OPEN_PATHS = ("/", "/health", "/metrics")
"""Answered without the API key: they tell how the server is, not what it does for whom."""
_TIERS = ("device", "host", "disk")


class JSONBody(Response):
    """A JSON answer."""

    media_type = "application/json"

    def __init__(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(_JSON.encode(data), status, headers)


def build_app(service: Service) -> FastAPI:
    """All routes over one service."""
    app = FastAPI(title="Forebay", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_forms(app, service)
    _add_openai(app, service)
    _add_operator(app, service)
    return app


def _add_error_forms(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        service.metrics.refused(error.status)
        return JSONBody(error.body(), error.status, error.headers())

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        answer = ApiError(f"{request.method} {request.url.path}: {error.detail}.", status=error.status_code)
        return JSONBody(answer.body(), error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        return JSONBody(ApiError("Internal error; the server's log has the details.", status=500).body(), 500)


def _guarded(
    service: Service, handler: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """``handler`` behind the API key, if there is one."""
    key = service.config.http.api_key

    async def checked(request: Request) -> Response:
        if key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise ApiError("Wrong or missing API key.", status=401, code="invalid_api_key")
        return await handler(request)

    return checked


def _add_openai(app: FastAPI, service: Service) -> None:
    async def models(request: Request) -> Response:
        service.check_open()
        created = int(service.state.started_at)
        entry = {
            "id": service.config.served_name,
            "object": "model",
            "created": created,
            "owned_by": "forebay",
            "max_model_len": service.limits.context_length,
        }
        return JSONBody({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        service.check_open()
        name = request.path_params["name"]
        if name not in service.limits.names:
            raise ApiError(f"The model {name!r} does not exist here.", status=404, code="model_not_found")
        created = int(service.state.started_at)
        return JSONBody({"id": name, "object": "model", "created": created, "owned_by": "forebay"})

    async def completions(request: Request) -> Response:
        service.check_open()
        body = await _read_body(request)
        return await _generate(service, read_completion(body, service.limits), body["model"], CompletionFormat)

    async def chat(request: Request) -> Response:
        service.check_open()
        body = await _read_body(request)
        template = service.text.template if service.text is not None else None
        return await _generate(service, read_chat(body, service.limits, template), body["model"], ChatFormat)

    app.add_route("/v1/models", _guarded(service, models), ["GET"])
    app.add_route("/v1/models/{name:path}", _guarded(service, model), ["GET"])
    app.add_route("/v1/completions", _guarded(service, completions), ["POST"])
    app.add_route("/v1/chat/completions", _guarded(service, chat), ["POST"])


async def _read_body(request: Request) -> Any:
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > _MOST_BODY_BYTES:
        raise ApiError(f"The body has {length} bytes; at most {_MOST_BODY_BYTES} are read.", status=413)
    try:
        return msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"The body is not valid JSON: {error}.") from error


async def _generate(
    service: Service, request: GenerationRequest, model: str, format_class: type[AnswerFormat]
) -> Response:
    assert service.text is not None
    generation, echoes = await service.submit(request)
    options = request.choices
    return GenerationResponse(
        generation,
        format_class(
            model,
            service.text.codec,
            wants_logprobs=options.sampling.logprobs is not None,
            wants_tokens=options.return_token_ids,
        ),
        stream=options.stream,
        include_usage=options.include_usage,
        echoes=echoes,
        on_end=service.end,
    )


def _add_operator(app: FastAPI, service: Service) -> None:
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    async def health(request: Request) -> Response:
        status, body = service.state.health()
        return JSONBody(body, status)

    async def health_generate(request: Request) -> Response:
        service.check_open()
        seconds = await service.probe()
        return JSONBody({"status": "ok", "tokens": 1, "seconds": round(seconds, 6)})

    async def info(request: Request) -> Response:
        return JSONBody(server_info(service, await service.stats()))

    async def metrics(request: Request) -> Response:
        stats = await service.stats()
        body = service.metrics.render(stats.get("cache", {}))
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(request: Request) -> Response:
        return JSONBody(status_json(service, await service.stats()))

    async def cache(request: Request) -> Response:
        service.check_open()
        return JSONBody(await _call(service, "cache"))

    async def flush(request: Request) -> Response:
        service.check_open()
        tier = request.query_params.get("tier")
        if tier is not None and tier not in _TIERS:
            raise ApiError(f"'tier' must be one of {', '.join(_TIERS)}, not {tier!r}.", param="tier")
        began = time.perf_counter()
        result = await _call(service, "flush", tier)
        return JSONBody({**result, "seconds": round(time.perf_counter() - began, 6)})

    async def index(request: Request) -> Response:
        return HTMLResponse(page)

    routes = {
        "/": index,
        "/health": health,
        "/health_generate": health_generate,
        "/server_info": info,
        "/metrics": metrics,
        "/status": status,
        "/cache": cache,
    }
    for path, handler in routes.items():
        app.add_route(path, handler if path in _OPEN_PATHS else _guarded(service, handler), ["GET"])
    app.add_route("/flush_cache", _guarded(service, flush), ["POST"])


async def _call(service: Service, method: str, tier: str | None = None) -> dict[str, Any]:
    try:
        return await service.link.call(method, tier=tier)
    except TimeoutError as error:
        raise unavailable("The engine did not answer within 30 s.", "engine_busy") from error
