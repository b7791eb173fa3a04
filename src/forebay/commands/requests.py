"""The requests, one record per command; each can be written as JSON and read back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from forebay.errors import UsageError
from forebay.json_records import decode_record
from forebay.operation.start.up_options import UpOptions

__all__ = [
    "DoctorRequest",
    "DownRequest",
    "LogsRequest",
    "RelayRequest",
    "Request",
    "ResolveRequest",
    "StatusRequest",
    "UpRequest",
    "VerifyRequest",
    "WaitRequest",
    "decode_request",
    "encode_request",
]


@dataclass(frozen=True, slots=True)
class UpRequest:
    """``forebay up``."""

    options: UpOptions


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """``forebay status``: one run, or all; ``earlier`` adds the ended ones that are kept."""

    name: str | None = None
    earlier: bool = False


@dataclass(frozen=True, slots=True)
class WaitRequest:
    """``forebay wait``."""

    target: str
    pid: int | None = None
    log: str | None = None
    server: str | None = None
    timeout: float | None = None
    hang_seconds: float = 120.0
    stall_seconds: float = 300.0
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """``forebay verify``."""

    target: str
    log: str | None = None
    server: str | None = None
    probe_seconds: float = 60.0
    force: bool = False
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """``forebay doctor``. ``facts``: what the user says of the machine, the fields of ``HostFacts``."""

    names: tuple[str, ...]
    exit_code: int | None = None
    kernel_log: str | None = None
    oom_kills: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DownRequest:
    """``forebay down``. ``run_id`` instead of a name ends the run with this id, if there is one."""

    name: str = ""
    run_id: str = ""
    drain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LogsRequest:
    """``forebay logs``: the last ``lines`` lines, or all from byte ``offset`` of the file ``inode`` on."""

    name: str
    follow: bool = False
    lines: int = 200
    events: bool = False
    path_only: bool = False
    offset: int | None = None
    inode: int | None = None


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """The host and port of a run or an address, as a client on the same machine reaches it."""

    target: str


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """Connections to ``host``:``port`` over the helper's stdin and stdout."""

    host: str
    port: int


Request = (
    UpRequest
    | StatusRequest
    | WaitRequest
    | VerifyRequest
    | DoctorRequest
    | DownRequest
    | LogsRequest
    | ResolveRequest
    | RelayRequest
)
_KINDS: dict[str, type[Any]] = {
    "up": UpRequest, "status": StatusRequest, "wait": WaitRequest, "verify": VerifyRequest, "doctor": DoctorRequest,
    "down": DownRequest, "logs": LogsRequest, "resolve": ResolveRequest, "relay": RelayRequest,
}  # fmt: skip


def encode_request(request: Request) -> dict[str, Any]:
    """As JSON: ``{"do": NAME, ...}``."""
    name = next(name for name, kind in _KINDS.items() if type(request) is kind)
    return {"do": name, **asdict(request)}


def decode_request(fields: dict[str, Any]) -> Request:
    """From JSON.

    Raises:
        UsageError: it is not a request.
    """
    kind = _KINDS.get(str(fields.get("do")))
    if kind is None:
        raise UsageError(f"unknown request {fields.get('do')!r}")
    try:
        request: Request = decode_record(kind, fields)
    except ValueError as error:
        raise UsageError(f"malformed request: {error}") from error
    return request
