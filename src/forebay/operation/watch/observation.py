"""What one observation of a server found: values only, so that the state machine can be tested without a server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay.servers.base import HealthReading, Role

__all__ = [
    "Activity",
    "DeathObservation",
    "LostProcess",
    "Observation",
    "Owner",
    "OwnerKind",
    "TokenState",
    "WatchedProcess",
]


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """A living process of the server."""

    pid: int
    role: Role
    state: str
    title: str

    @property
    def stopped(self) -> bool:
        """In process state T: stopped by a signal or a tracer."""
        return self.state in ("T", "t")


@dataclass(frozen=True, slots=True)
class LostProcess:
    """An essential process that was there and is gone (or a zombie).

    ``exit_code`` is known only to the process that launched it.
    """

    pid: int
    role: Role
    title: str
    exit_code: int | None = None

    def describe(self) -> str:
        """``its API server (pid 7, python …) is gone, exit code 1``."""
        how = "" if self.exit_code is None else f", {describe_exit(self.exit_code)}"
        return f"its {self.role.label} (pid {self.pid}, {self.title[:60].strip()}) is gone{how}"


def describe_exit(code: int) -> str:
    """``exit code 1`` or ``killed by signal 9``."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class OwnerKind(StrEnum):
    """Who holds the listening socket."""

    NONE = "none"
    OWN = "own"  # a process of this server
    OTHER = "other"
    HIDDEN = "hidden"  # somebody listens; the process cannot be seen


@dataclass(frozen=True, slots=True)
class Owner:
    """Who listens on the server's port."""

    kind: OwnerKind
    pid: int | None = None
    command: str = ""

    def describe(self, port: int) -> str:
        """For evidence lines."""
        if self.kind is OwnerKind.NONE:
            return f"nothing listens on port {port}"
        if self.pid is None:
            return f"port {port} is listening; its process cannot be seen"
        return f"port {port} is held by pid {self.pid} ({self.command[:100]})"


@dataclass(frozen=True, slots=True)
class TokenState:
    """The watcher's one-token request: outstanding since (monotonic seconds), the last success, the last failure."""

    outstanding_since: float | None = None
    ok_at: float | None = None
    failure: str | None = None
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Activity:
    """Sums over the server's processes; they grow while it works.

    Attributes:
        cpu_s: CPU seconds of all processes.
        engine_cpu_s: of engines and workers only.
        rss_bytes: resident now.
        read_bytes: read so far, from page cache or disk.
        log_bytes: length of the log.
        tokens: the server's token counter, None where unknown.
    """

    cpu_s: float = 0.0
    engine_cpu_s: float = 0.0
    rss_bytes: int = 0
    read_bytes: int = 0
    log_bytes: int = 0
    tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """The server at one moment. ``at`` is monotonic seconds; ``pid_known`` is False while no process is known."""

    at: float
    pid_known: bool
    processes: tuple[WatchedProcess, ...] = ()
    lost: tuple[LostProcess, ...] = ()
    owner: Owner = Owner(OwnerKind.NONE)
    health: HealthReading | None = None
    token: TokenState = TokenState()
    activity: Activity = Activity()
    stage: str = ""
    percent: float | None = None
    error_line: str | None = None
    paused: str | None = None  # evidence that it was paused on request


@dataclass(frozen=True, slots=True)
class DeathObservation:
    """What the watcher saw of a death. ``lost`` is in the order in which the processes went."""

    lost: tuple[LostProcess, ...] = ()
    owner: Owner = Owner(OwnerKind.NONE)
