"""What one look at a server found: values only, so that judging it needs no server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay.servers.base import HealthReading, Role

__all__ = ["Activity", "DeathObservation", "Lost", "Observation", "Owner", "OwnerKind", "TokenState", "Watched"]


@dataclass(frozen=True, slots=True)
class Watched:
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
class Lost:
    """An essential process that was there and is gone (or a zombie). ``exit_code`` only where it was our own child."""

    pid: int
    role: Role
    title: str
    exit_code: int | None = None

    def describe(self) -> str:
        """``the API server (pid 7, python …) is gone, exit code 1``."""
        how = "" if self.exit_code is None else f", {describe_exit(self.exit_code)}"
        return f"its {self.role} (pid {self.pid}, {self.title[:60].strip()}) is gone{how}"


def describe_exit(code: int) -> str:
    """``exit code 1`` or ``killed by signal 9``."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class OwnerKind(StrEnum):
    """Whose the listening socket is."""

    NOBODY = "nobody"
    OURS = "ours"
    OTHER = "other"
    HIDDEN = "hidden"  # somebody listens, and we may not see who


@dataclass(frozen=True, slots=True)
class Owner:
    """Who listens on the server's port."""

    kind: OwnerKind
    pid: int | None = None
    command: str = ""

    def describe(self, port: int) -> str:
        """For evidence lines."""
        if self.kind is OwnerKind.NOBODY:
            return f"nothing listens on port {port}"
        if self.pid is None:
            return f"port {port} is listening; whose it is cannot be seen"
        return f"port {port} is held by pid {self.pid} ({self.command[:100]})"


@dataclass(frozen=True, slots=True)
class TokenState:
    """Our own one-token request: outstanding since (monotonic seconds), the last success, the last failure."""

    outstanding_since: float | None = None
    ok_at: float | None = None
    failure: str | None = None
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Activity:
    """Sums over the server's processes that only grow while something happens.

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
    """One look. ``at`` is monotonic seconds; ``pid_known`` is False where no process could be named at all."""

    at: float
    pid_known: bool
    processes: tuple[Watched, ...] = ()
    lost: tuple[Lost, ...] = ()
    owner: Owner = Owner(OwnerKind.NOBODY)
    health: HealthReading | None = None
    token: TokenState = TokenState()
    activity: Activity = Activity()
    stage: str = ""
    percent: float | None = None
    error_line: str | None = None
    paused: str | None = None  # evidence that it was paused on request


@dataclass(frozen=True, slots=True)
class DeathObservation:
    """What the watch itself saw of the death. ``lost`` in the order in which they went."""

    lost: tuple[Lost, ...] = ()
    owner: Owner = Owner(OwnerKind.NOBODY)
