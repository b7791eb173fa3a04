"""From a handler to a route: API key, errors as answers, and the count of requests that a shutdown waits for."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.engine.api.errors import ApiError
from forebay.engine.api.http.json_response import ClosingError, JSONBody

__all__ = ["Admission", "ApiKey", "Endpoint", "Handler", "error_response"]

Handler = Callable[[Request], Awaitable[Response]]


class Admission(Protocol):
    """Who counts the requests that a shutdown waits for."""

    def admit(self, task: asyncio.Task[None]) -> None:
        """Count a request; its task may be cancelled until ``accepted``.

        Raises:
            ApiError: 503: the server is not open.
        """

    def accepted(self, task: asyncio.Task[None]) -> None:
        """The request has been read and queued, or refused."""

    def leave(self) -> None:
        """The request's answer has been sent."""

    def closing_error(self) -> ApiError | None:
        """Why requests are no longer accepted, after their tasks were cancelled."""

    def refused(self, status: int) -> None:
        """A request was answered with an error."""


class ApiKey:
    """Compares what a client sends with the server's key, in a time that does not depend on where they differ.

    Args:
        key: None: every client is let in.
    """

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(key.encode())

    def check(self, request: Request) -> None:
        """Look for ``Authorization: Bearer KEY``, or Anthropic's ``x-api-key: KEY``.

        Raises:
            ApiError: 401.
        """
        if self._digest is None:
            return
        given = request.headers.get("x-api-key")
        if given is None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(_digest(given.encode("latin-1", "replace")), self._digest):
            raise ApiError("Wrong or missing API key.", status=401, code="invalid_api_key")


class Endpoint:
    """A handler as an ASGI application, so that it also covers sending the answer.

    Args:
        handler: makes the answer.
        admission: counts errors, and requests if ``is_counted``.
        key: checked before anything else; None: open to all.
        is_counted: a shutdown waits for the answer.
    """

    def __init__(
        self, handler: Handler, admission: Admission, *, key: ApiKey | None = None, is_counted: bool = False
    ) -> None:
        self._handler = handler
        self._admission = admission
        self._key = key
        self._is_counted = is_counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        task = asyncio.current_task()
        assert task is not None
        try:
            if self._key is not None:
                self._key.check(request)
            if self._is_counted:
                self._admission.admit(task)
        except ApiError as error:
            self._admission.refused(error.status)
            await error_response(error)(scope, receive, send)
            return
        try:
            await (await self._answer(request, task))(scope, receive, send)
        except ClientDisconnect:
            return
        finally:
            if self._is_counted:
                self._admission.leave()

    async def _answer(self, request: Request, task: asyncio.Task[None]) -> Response:
        try:
            return await self._handler(request)
        except ApiError as error:
            self._admission.refused(error.status)
            return error_response(error)
        except asyncio.CancelledError:
            closing = self._admission.closing_error()
            if closing is None or not self._is_counted:
                raise
            task.uncancel()
            return ClosingError(closing.body(), closing.status, closing.headers())
        finally:
            if self._is_counted:
                self._admission.accepted(task)


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's shape."""
    if error.closes:
        return ClosingError(error.body(), error.status, error.headers())
    return JSONBody(error.body(), error.status, error.headers())


def _digest(key: bytes) -> bytes:
    """Of equal length whatever the key's."""
    return hashlib.sha256(key).digest()
