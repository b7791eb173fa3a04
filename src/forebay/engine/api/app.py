"""The HTTP application: every route of the server."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from forebay.engine.api import operator_routes
from forebay.engine.api.errors import ApiError
from forebay.engine.api.http.endpoint import ApiKey, error_response
from forebay.engine.api.openai import routes as openai_routes
from forebay.engine.api.service import Service

__all__ = ["build_app"]


def build_app(service: Service) -> Starlette:
    """All routes over one service."""
    key = ApiKey(service.config.http.api_key)
    return Starlette(
        routes=[*openai_routes.routes(service, key), *operator_routes.routes(service, key)],
        exception_handlers={HTTPException: _on_http_error, Exception: _on_bug},
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, or another method than the path has."""
    assert isinstance(error, HTTPException)
    answer = ApiError(f"{request.method} {request.url.path}: {error.detail}.", status=error.status_code)
    response = error_response(answer)
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError("Internal error; the server's log has the details.", status=500))
