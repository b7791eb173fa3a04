"""Server addresses, and a request whose failures are values: the caller decides what "no answer" means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from forebay.errors import UsageError
from forebay.machine.interface import HttpFailure, HttpFailureKind, Machine

__all__ = ["Address", "ServerAnswer", "as_mapping", "parse_address", "send"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is reached. ``api_key``: sent as a bearer token where it is not empty, and never shown."""

    host: str
    port: int
    scheme: str = "http"
    api_key: str = field(default="", repr=False, compare=False)

    @property
    def url(self) -> str:
        """The address as a URL, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, so that its processes can be read."""
        return self.host in ("localhost", "::1", "0.0.0.0", "::") or self.host.startswith("127.")


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A status with its body, or the reason why there is none (``failure``)."""

    status: int | None
    body: bytes
    seconds: float
    failure: HttpFailureKind | None = None

    def json(self) -> object:
        """The body as JSON, or None when it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def ok(self) -> bool:
        """The status is 2xx; the body does not matter."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    def describe(self, path: str) -> str:
        """``/health answered 200`` or ``/health: refused``, for evidence lines."""
        return f"{path} answered {self.status}" if self.status is not None else f"{path}: {self.failure}"


def parse_address(url: str, api_key: str = "") -> Address:
    """Read ``http://host:port``, ``host:port`` or ``:port``.

    Raises:
        UsageError: no port, or a scheme other than http and https.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"{url!r} is not an address: its port is no number", fix="write http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or (port is None and "://" not in url):
        raise UsageError(f"{url!r} is not an address", fix="write http://HOST:PORT")
    return Address(
        parts.hostname or "127.0.0.1", port or (443 if parts.scheme == "https" else 80), parts.scheme, api_key
    )


def send(
    machine: Machine,
    address: Address,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    timeout_s: float,
) -> ServerAnswer:
    """Send one request on a connection of its own; ``timeout_s`` bounds each wait on the socket."""
    headers = {"Connection": "close"}
    if address.api_key:
        headers["Authorization"] = f"Bearer {address.api_key}"
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    try:
        answer = machine.http(method, address.url + path, body=data, headers=headers, timeout_s=timeout_s)
    except HttpFailure as failure:
        return ServerAnswer(None, b"", failure.seconds, failure.kind)
    return ServerAnswer(answer.status, answer.body, answer.seconds)


def as_mapping(value: object) -> Mapping[str, object]:
    """``value`` where it is a JSON object, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}
