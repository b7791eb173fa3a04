"""The options of ``forebay up``."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["UpOptions"]


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options as given; sizes in bytes.

    Attributes:
        last_port: with it the first free port from ``port`` to it is taken.
        plan_text: the content of a saved plan, where ``model`` is its name on the machine of the user.
        host_cache: ``auto`` is a small default, sized to the machine.
        ask: a question to send once the server is ready.
        api_key: the server asks its clients for it; kept in no record and no command line.
        run_id: chosen by the caller.
        resume: the connection was lost: go on with the run of this ``run_id`` where there is one.
        started_by: ``user@host`` of the person who typed the command.
        events_offset: events of the run before this byte were seen already.
    """

    model: str
    plan_text: str | None = None
    server: str | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    last_port: int | None = None
    served_name: str | None = None
    tp: int | None = None
    context: int | None = None
    host_cache: int | Literal["auto"] | None = None
    device_cache: int | None = None
    write_policy: str | None = None
    python: str | None = None
    detach: bool = False
    ask: str | None = None
    no_verify: bool = False
    no_plan: bool = False
    probe_seconds: float = 60.0
    timeout: float | None = None
    hang_seconds: float = 120.0
    stall_seconds: float = 300.0
    server_flags: tuple[str, ...] = ()
    api_key: str = field(default="", repr=False)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    resume: bool = False
    started_by: str = ""
    events_offset: int = 0
