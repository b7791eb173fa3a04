"""OpenAI's routes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forebay.engine.api.errors import ApiError
from forebay.engine.api.http.body import read_body
from forebay.engine.api.http.endpoint import ApiKey, Endpoint, Handler
from forebay.engine.api.http.json_response import JSONBody
from forebay.engine.api.openai.requests import GenerationRequest, read_chat, read_completion
from forebay.engine.api.openai.responses import AnswerFormat, ChatFormat, CompletionFormat
from forebay.engine.api.openai.streaming import GenerationResponse
from forebay.engine.api.service import Service

__all__ = ["routes"]


class _OpenAI:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        self._service.check_open()
        return JSONBody({"object": "list", "data": [self._entry(self._service.config.served_name)]})

    async def model(self, request: Request) -> Response:
        self._service.check_open()
        name = request.path_params["name"]
        if name not in self._service.limits.names:
            raise ApiError(f"The model {name!r} does not exist here.", status=404, code="model_not_found")
        return JSONBody(self._entry(name))

    async def completions(self, request: Request) -> Response:
        body = await self._json(request)
        return await self._generate(read_completion(body, self._service.limits), body["model"], CompletionFormat)

    async def chat(self, request: Request) -> Response:
        body = await self._json(request)
        template = self._service.text.template if self._service.text is not None else None
        return await self._generate(read_chat(body, self._service.limits, template), body["model"], ChatFormat)

    def _entry(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": int(service.state.started_at),
            "owned_by": "forebay",
            "max_model_len": service.limits.context_length,
        }

    async def _json(self, request: Request) -> Any:
        body = await read_body(request, self._service.connection_limits)
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(f"The body is not valid JSON: {error}.") from error

    async def _generate(self, request: GenerationRequest, model: str, format_class: type[AnswerFormat]) -> Response:
        service = self._service
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


def routes(service: Service, key: ApiKey) -> list[Route]:
    """OpenAI's routes."""
    openai = _OpenAI(service)

    def route(path: str, handler: Handler, method: str, *, is_counted: bool = False) -> Route:
        return Route(path, Endpoint(handler, service, key=key, is_counted=is_counted), methods=[method])

    return [
        route("/v1/models", openai.models, "GET"),
        route("/v1/models/{name:path}", openai.model, "GET"),
        route("/v1/completions", openai.completions, "POST", is_counted=True),
        route("/v1/chat/completions", openai.chat, "POST", is_counted=True),
    ]
