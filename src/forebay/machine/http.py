"""One HTTP request with the standard library: small timeouts, any status is an answer, every failure has a kind."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from forebay.machine.interface import HttpAnswer, HttpFailure, HttpFailureKind

__all__ = ["request"]


def request(
    method: str,
    url: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
) -> HttpAnswer:
    """Send one request and read the whole answer; no redirects are followed, no proxy is used.

    Args:
        timeout_s: for connecting and for each wait on the socket.

    Raises:
        HttpFailure: no answer: refused, timed out, reset, unreachable, or not HTTP.
    """
    started = time.monotonic()
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HttpFailure(HttpFailureKind.PROTOCOL, f"{url!r} is not an http address", 0.0)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    try:
        connection.request(method, target, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise _failure(error, time.monotonic() - started) from error
    finally:
        connection.close()
    names = {name.lower(): value for name, value in response.getheaders()}
    return HttpAnswer(response.status, names, data, time.monotonic() - started)


def _failure(error: Exception, seconds: float) -> HttpFailure:
    detail = str(error) or type(error).__name__
    if isinstance(error, ConnectionRefusedError):
        return HttpFailure(HttpFailureKind.REFUSED, detail, seconds)
    if isinstance(error, TimeoutError):
        return HttpFailure(HttpFailureKind.TIMEOUT, detail, seconds)
    if isinstance(error, ConnectionError | http.client.RemoteDisconnected | http.client.IncompleteRead):
        return HttpFailure(HttpFailureKind.RESET, detail, seconds)
    if isinstance(error, http.client.HTTPException | ssl.SSLError):
        return HttpFailure(HttpFailureKind.PROTOCOL, detail, seconds)
    if isinstance(error, socket.gaierror):
        return HttpFailure(HttpFailureKind.UNREACHABLE, f"host not found: {detail}", seconds)
    return HttpFailure(HttpFailureKind.UNREACHABLE, detail, seconds)
