"""The kinds of failure of one request; the kind decides whether it is retried, waited out or given up."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["FailureKind", "RequestFailure"]


class FailureKind(StrEnum):
    """Stable ids; progress lines, events and reports count failures by them."""

    CONNECT = "connect"  # nothing accepted the connection
    BROKEN = "broken"  # the connection ended before the answer did
    TIMEOUT = "timeout"  # no byte for the read timeout
    RATE_LIMITED = "rate_limited"  # 429
    UNAVAILABLE = "unavailable"  # 502, 503, 504: the server is not ready
    SERVER_ERROR = "server_error"  # another 5xx, 408 or 425, or an error in a stream that had begun
    REFUSED = "refused"  # 400, 413, 422: this request will never be accepted
    NOT_ALLOWED = "not_allowed"  # 401, 403, 404: no request will be accepted
    BAD_ANSWER = "bad_answer"  # 200, but not an answer of the API


SERVER_IS_DOWN = frozenset({FailureKind.CONNECT, FailureKind.BROKEN, FailureKind.TIMEOUT, FailureKind.UNAVAILABLE})


class RequestFailure(Exception):
    """A request without an answer.

    Args:
        kind: what happened.
        message: the server's error message, or the socket's.
        status: the HTTP status, when there was one.
        retry_after_s: seconds the server asked to wait, when it did.
    """

    def __init__(
        self, kind: FailureKind, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def server_is_down(self) -> bool:
        """True when the cause is the server and not the request; the server may be ready again later."""
        return self.kind in SERVER_IS_DOWN


def kind_of_status(status: int) -> FailureKind:
    """The kind of a non-2xx status."""
    if status == 429:
        return FailureKind.RATE_LIMITED
    if status in (502, 503, 504):
        return FailureKind.UNAVAILABLE
    if status >= 500 or status in (408, 425):  # request timeout, too early: the request may be sent again
        return FailureKind.SERVER_ERROR
    if status in (401, 403, 404):
        return FailureKind.NOT_ALLOWED
    return FailureKind.REFUSED
