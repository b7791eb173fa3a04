"""What the operator knows of any server: how to start it, what its answers mean, what it counts.

Everything here is a value or a pure function over values; nothing opens a socket or looks at a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from forebay.servers.http_client import ServerAnswer
from forebay.servers.install import Installation

__all__ = [
    "Added",
    "Condition",
    "Counters",
    "HealthReading",
    "Launch",
    "ProbeRequest",
    "ProcessView",
    "Role",
    "Server",
    "Setting",
    "ShutdownPolicy",
    "StartRequest",
    "TokenReading",
]


class Role(StrEnum):
    """What a process of a server is for. Every role but HELPER is essential: its death is the server's."""

    API_SERVER = "api_server"
    ENGINE = "engine"
    WORKER = "worker"
    TRACKER = "tracker"  # multiprocessing's resource tracker: unlinks shared memory when all others are gone
    HELPER = "helper"


class Condition(StrEnum):
    """What one health answer says."""

    REFUSED = "refused"  # nothing listens
    STARTING = "starting"
    UP = "up"
    UNHEALTHY = "unhealthy"  # it answered, and says it cannot serve
    SILENT = "silent"  # connected, and no answer within the time given


@dataclass(frozen=True, slots=True)
class HealthReading:
    """A health answer, read with one server's meaning."""

    condition: Condition
    evidence: str
    stage: str | None = None  # where the server itself names its stage (embedded)
    percent: float | None = None


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """A request to send: method, path, JSON body (None for no body), seconds to wait."""

    method: str
    path: str
    body: Mapping[str, object] | None = None
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class TokenReading:
    """Whether an answer holds a generated token; with the usage it reports."""

    ok: bool
    evidence: str
    text: str = ""
    prompt_tokens: int | None = None
    cached: Mapping[str, int] | None = None  # tier -> tokens; None where the server does not say


@dataclass(frozen=True, slots=True)
class Counters:
    """What /metrics counts, in one shape for every server; None where it is not there.

    Attributes:
        tokens: prompt and generated tokens processed so far: moves while the engine works.
        generated: generated tokens so far.
        running, waiting, paused: requests now.
        hits: tier (``device``, ``host``, ``disk``, ``external``) -> prompt tokens taken from it so far.
        backed_up, loaded_back: tokens written to and read from the lower tiers so far.
        pools: tier -> capacity in tokens (SGLang: of rank 0).
        used: tier -> tokens held now.
    """

    tokens: float | None = None
    generated: float | None = None
    running: float | None = None
    waiting: float | None = None
    paused: float | None = None
    hits: Mapping[str, float] = field(default_factory=dict)
    backed_up: float | None = None
    loaded_back: float | None = None
    pools: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Requests are in flight."""
        return bool((self.running or 0) + (self.waiting or 0))


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The little of a process that roles are read from."""

    pid: int
    ppid: int
    name: str
    command: str


@dataclass(frozen=True, slots=True)
class Added:
    """A flag or variable that Forebay added, and why: said to the user."""

    text: str
    why: str


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What to start beyond what the plan decides (model, ranks, context, host tier). None leaves the server's default.

    Attributes:
        device_cache_bytes: device pool *per rank*, for servers whose plan does not decide it (the embedded server's does, in
            total over the ranks).
        extra: the user's own flags, in the server's own units; they win over everything above.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_name: str | None = None
    device_cache_bytes: int | None = None
    write_policy: str | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A command ready to run: argv, variables to set on top of the environment, and what Forebay added."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    added: tuple[Added, ...] = ()


@dataclass(frozen=True, slots=True)
class ShutdownPolicy:
    """How a server takes being stopped.

    Attributes:
        repeat_term_s: while loading, one SIGTERM may be ignored: send it again this often.
        loading_kills_engine: SIGKILL of its engine is the quickest clean abort of a load.
        engine_term_s: after the API server is gone, an engine is given SIGTERM and this long to leave.
        drain_s: how long a serving API server may take to drain before SIGKILL.
    """

    repeat_term_s: float = 3.0
    loading_kills_engine: bool = False
    engine_term_s: float = 8.0
    drain_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as asked and as in effect, for ``verify``. ``unit`` is printed after both values."""

    name: str
    asked: str | None
    effective: str | None
    evidence: str
    missing_flag: str | None = None  # the flag that would make it known
    tolerance: float = 0.0  # relative: pools are rounded down to whole pages


class Server(Protocol):
    """One server program."""

    name: str
    distributions: tuple[str, ...]  # names its package is published under
    health_path: str
    health_generates: bool  # its health check itself generates a token
    shutdown_policy: ShutdownPolicy
    pause_paths: tuple[str, ...]  # asked when a server that is up does not generate
    info_paths: tuple[str, ...]  # asked for the settings in effect
    flush_path: str | None  # POST drops the device copies of cached pages, and nothing else
    evidence_flag: str  # without it the server does not say where cached tokens came from

    def flags(self, request: StartRequest) -> tuple[str, ...]:
        """``request`` in this server's own flags, the user's own last.

        Raises:
            UsageError: something in the request has no flag in this server.
        """

    def finalize_command(
        self, argv: Sequence[str], env: Mapping[str, str], installation: Installation, *, gpus: int
    ) -> Launch:
        """A planned command made to run here: this installation's interpreter, evidence flags added.

        Args:
            gpus: accelerators of this machine; 0 starts on the CPU.
        """

    def env_for_planning(self, installation: Installation) -> Mapping[str, str]:
        """Variables that tell the planner what this installation is; they stay in the command's environment."""

    def roles(self, processes: Sequence[ProcessView], api_server: int) -> dict[int, Role]:
        """The role of each process of the tree under ``api_server`` (orphans of it included)."""

    def read_health(self, answer: ServerAnswer) -> HealthReading:
        """The meaning of an answer of ``health_path``."""

    def read_pause(self, answers: Mapping[str, ServerAnswer]) -> str | None:
        """Evidence that generation was paused on request, from the answers of ``pause_paths``; None: it was not, or unknown."""

    def build_probe_request(self, model: str | None, prompt: str = "1, 2, 3,", tokens: int = 1) -> ProbeRequest:
        """A greedy request of ``tokens`` tokens."""

    def read_token(self, answer: ServerAnswer) -> TokenReading:
        """Whether ``answer`` to ``build_probe_request`` holds a token."""

    def counters(self, metrics: str) -> Counters:
        """The counters in the text of /metrics."""

    def info(self, answers: Mapping[str, ServerAnswer], metrics: str) -> Mapping[str, object]:
        """What ``settings`` reads, from the answers of ``info_paths`` and the text of /metrics."""

    def offload_tiers(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The tiers below the device that ``argv`` asks for; a hit in any of them proves the cache."""

    def settings(self, argv: Sequence[str], info: Mapping[str, object] | None, counters: Counters) -> list[Setting]:
        """Asked against effective, from the command line, the server's own report and its counters."""
