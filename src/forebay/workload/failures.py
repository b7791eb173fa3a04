"""What can go wrong with one request, by kind: the kind decides who waits, who retries and who gives up."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["FailureKind", "RequestFailure"]


class FailureKind(StrEnum):
    """Stable ids: they are counted in progress lines, events and reports."""

    CONNECT = "connect"  # nothing accepted the connection
    BROKEN = "broken"  # the connection ended before the answer did
    TIMEOUT = "timeout"  # no byte for the read timeout
    RATE_LIMITED = "rate_limited"  # 429: the server asks for patience
    UNAVAILABLE = "unavailable"  # 502, 503, 504: the server is not ready
    SERVER_ERROR = "server_error"  # another 5xx, 408 or 425, or an error in a stream that had begun
    REFUSED = "refused"  # 400, 413, 422: this request will never be accepted
    NOT_ALLOWED = "not_allowed"  # 401, 403, 404: no request will be accepted
    BAD_ANSWER = "bad_answer"  # 200, but not an answer we can read


SERVER_IS_AWAY = frozenset({FailureKind.CONNECT, FailureKind.BROKEN, FailureKind.TIMEOUT, FailureKind.UNAVAILABLE})


class RequestFailure(Exception):
    """One request did not bring an answer.

    Args:
        kind: what happened.
        message: the server's words, or the socket's.
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
    def server_is_away(self) -> bool:
        """True when the server, not the request, is at fault and may come back."""
        return self.kind in SERVER_IS_AWAY


def kind_of_status(status: int) -> FailureKind:
    """The kind of a non-2xx status."""
    if status == 429:
        return FailureKind.RATE_LIMITED
    if status in (502, 503, 504):
        return FailureKind.UNAVAILABLE
    if status >= 500 or status in (408, 425):  # too slow, too early: not this request's fault
        return FailureKind.SERVER_ERROR
    if status in (401, 403, 404):
        return FailureKind.NOT_ALLOWED
    return FailureKind.REFUSED
