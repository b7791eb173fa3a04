"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "not_implemented", "overloaded", "unavailable"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An answer other than 2xx.

    Args:
        message: one sentence for the client's developer.
        status: HTTP status.
        param: the request's field at fault.
        code: a stable word for programs.
        retry_after_s: sent as Retry-After.
        closes: the connection cannot be used for another request.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.closes = closes

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers beside the body's."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.closes:
            headers["connection"] = "close"
        return headers


def not_implemented(param: str, hint: str = "") -> ApiError:
    """A parameter we know and do not have: named, never ignored."""
    text = f"{param!r} is not implemented by this server{': ' + hint if hint else ''}. Leave it out."
    return ApiError(text, param=param, code="unsupported_parameter")


def overloaded(retry_after_s: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        f"The request queue is full; try again in {retry_after_s} s (--max-queue sets its length).",
        status=429,
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def unavailable(message: str, code: str) -> ApiError:
    """503: ``message`` must hold fixed words only (no body of a 503 may contain the letters o and k in a row)."""
    return ApiError(message, status=503, code=code, retry_after_s=1)
