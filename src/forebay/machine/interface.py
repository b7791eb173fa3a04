"""The interface to a machine: everything the operator reads or does there goes through it.

``LocalMachine`` is this machine; ``RecordedMachine`` is a folder of recorded looks, for tests and for machines one
cannot reach. The rooms on top (memory, processes, ports, shm, accelerators, kernel_log) take a ``Machine`` and hold the
knowledge of /proc, /sys and /dev/shm, so a machine over SSH needs only these methods.

A look that fails raises ``OSError`` (``FileNotFoundError``, ``PermissionError``, ``ProcessLookupError``), as a local
file would; the rooms turn that into "not there" or "not readable", never into a wrong number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

__all__ = [
    "BindResult",
    "Child",
    "CommandResult",
    "FileStat",
    "GpuReading",
    "HttpAnswer",
    "HttpFailure",
    "HttpFailureKind",
    "Machine",
    "Space",
    "Tail",
]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that ended. ``exit_code`` is negative for a signal; 127 where the program is not there,
    124 for a timeout.
    """

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class FileStat:
    """A file's numbers; ``allocated_bytes`` is what it really occupies (sparse files, /dev/shm)."""

    size_bytes: int
    allocated_bytes: int
    mtime_s: float
    inode: int
    is_dir: bool
    uid: int


@dataclass(frozen=True, slots=True)
class Space:
    """A file system: its size and what an ordinary user can still write."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Tail:
    """What a growing file has from ``offset`` on. ``offset`` is where to go on; ``replaced``:
    it shrank or is another file.
    """

    data: bytes
    offset: int
    inode: int
    replaced: bool


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer of any status. Header names are lower case; ``seconds`` is how long it took."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        """2xx: the status decides, never the body."""
        return 200 <= self.status < 300


class HttpFailureKind(StrEnum):
    """Why there was no answer."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    RESET = "reset"
    UNREACHABLE = "unreachable"
    PROTOCOL = "protocol"


class HttpFailure(OSError):
    """No HTTP answer came back."""

    def __init__(self, kind: HttpFailureKind, detail: str, seconds: float) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.seconds = seconds


class BindResult(StrEnum):
    """What an attempt to bind a TCP port said (nothing stays bound)."""

    FREE = "free"
    TAKEN = "taken"
    DENIED = "denied"
    NO_SUCH_ADDRESS = "no_such_address"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU as NVML shows it. ``processes`` maps pid to bytes;
    pids of other containers appear as the driver reports them.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    processes: Mapping[int, int] = field(default_factory=dict)
    compute_capability: str | None = None
    driver: str | None = None
    problem: str | None = None
    """Why its numbers could not be read (it fell off the bus, it needs a reset); then the sizes are 0."""


class Child(Protocol):
    """A process this machine started for us, in a session of its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code once it has ended and been reaped (negative: a signal), else None."""

    def wait(self, timeout_s: float) -> int | None:
        """As ``poll``, waiting up to ``timeout_s``."""


@runtime_checkable
class Machine(Protocol):
    """Looks and acts on one machine. Paths are absolute, text is UTF-8 with undecodable bytes replaced."""

    @property
    def name(self) -> str:
        """``local``, or where it is."""

    def batch(
        self,
        *,
        read: Sequence[str] = (),
        globs: Sequence[str] = (),
        folders: Sequence[str] = (),
        spaces: Sequence[str] = (),
        commands: Sequence[Sequence[str]] = (),
        clock: bool = False,
    ) -> AbstractContextManager[None]:
        """Announce what is going to be read inside the block; a machine far away then fetches all of it in one round
        trip.

        Only speed depends on it: whatever was not announced is read as usual. Inside the block the values do not
        change.

        Args:
            read: paths of files for ``read`` and ``read_bytes``.
            globs: patterns of such paths.
            folders: for ``listdir``.
            spaces: for ``space``.
            commands: for ``run``.
            clock: for ``now``.
        """

    def read_bytes(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """A file's bytes from ``offset``, at most ``limit``. Raises OSError."""

    def read(self, path: str) -> str:
        """A small text file, whole. Raises OSError."""

    def tail(self, path: str, offset: int, inode: int | None = None, limit: int = 1 << 20) -> Tail:
        """New bytes of a growing file since the last Tail's ``offset`` and ``inode``. Raises OSError."""

    def listdir(self, path: str) -> list[str]:
        """Names in a folder, unordered. Raises OSError."""

    def readlink(self, path: str) -> str:
        """Where a symbolic link (/proc/PID/fd/N, /proc/PID/exe) points. Raises OSError."""

    def stat(self, path: str) -> FileStat:
        """A file's numbers, following links. Raises OSError."""

    def space(self, path: str) -> Space:
        """The file system that holds ``path``. Raises OSError."""

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 10.0, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a short command to its end; never raises for its failure."""

    def http(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> HttpAnswer:
        """One request from that machine. Raises HttpFailure; any status is an answer."""

    def try_bind(self, host: str, port: int) -> BindResult:
        """Would a server get this TCP port now? Finds a port that is bound without listening,
        which /proc/net/tcp hides.
        """

    def gpus(self) -> list[GpuReading]:
        """The machine's GPUs; empty without a driver."""

    def now(self) -> float:
        """Its wall clock, seconds since the epoch."""

    def signal(self, pid: int, number: int, start_ticks: int) -> bool:
        """Send a signal to ``pid`` if it is still the process that started at ``start_ticks``; False: it is not."""

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log_path: str) -> Child:
        """Start a long-lived process in a session of its own, stdout and stderr appended to ``log_path``.
        Raises OSError.
        """

    def remove(self, path: str) -> None:
        """Unlink a file. Raises OSError."""
