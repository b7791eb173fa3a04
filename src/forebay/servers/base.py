"""The interface to a server program: how to start it, how to read its answers and its counters.

Everything here is a value or a pure function over values; nothing opens a socket or reads a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from forebay.servers.http_client import ServerAnswer
from forebay.servers.install import Installation

__all__ = [
    "AddedFlag",
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
    "known_setting",
]


class Role(StrEnum):
    """What a process of a server does. If one of a role other than TRACKER and HELPER dies, the server is dead."""

    API_SERVER = "api_server"
    ENGINE = "engine"
    WORKER = "worker"
    TRACKER = "tracker"  # multiprocessing's resource tracker: unlinks shared memory when all others are gone
    HELPER = "helper"

    @property
    def label(self) -> str:
        """For a sentence: ``API server``, ``engine``, ..."""
        return "API server" if self is Role.API_SERVER else self.value


class Condition(StrEnum):
    """What one health answer means."""

    REFUSED = "refused"  # nothing listens
    STARTING = "starting"
    UP = "up"
    UNHEALTHY = "unhealthy"  # it answered that it cannot serve
    SILENT = "silent"  # connected, but no answer came in time


@dataclass(frozen=True, slots=True)
class HealthReading:
    """A health answer as one server means it."""

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
    """Whether an answer holds a generated token, and the usage it reports."""

    ok: bool
    evidence: str
    text: str = ""
    prompt_tokens: int | None = None
    cached: Mapping[str, int] | None = None  # tier -> tokens; None where the server does not say


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of /metrics in one form for every server; None where a server has no such counter.

    Attributes:
        tokens: prompt and generated tokens so far; it grows while the engine works.
        generated: generated tokens so far.
        running, waiting, paused: requests now.
        hits: tier (``device``, ``host``, ``disk``, ``external``) -> prompt tokens taken from it so far.
        backed_up, loaded_back: written to and read from the lower tiers so far, in ``moved_unit``.
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
    moved_unit: str = "tokens"
    pools: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Requests are in flight."""
        return bool((self.running or 0) + (self.waiting or 0))


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The fields of a process from which its role is read."""

    pid: int
    ppid: int
    name: str
    command: str


@dataclass(frozen=True, slots=True)
class AddedFlag:
    """A flag or variable that Forebay added to the command, and why; shown to the user."""

    text: str
    why: str


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Settings of a start that the plan does not decide. None leaves the server's default.

    Attributes:
        device_cache_bytes: device pool *per rank*, for servers whose plan does not decide it. (For the embedded server
            the plan decides it, in total over the ranks.)
        extra: the user's own flags in the server's own units; they override everything above.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_name: str | None = None
    device_cache_bytes: int | None = None
    write_policy: str | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A command ready to run: argv, variables to add to the environment, and the flags that Forebay added.

    Attributes:
        secret_env: variables with secrets; passed on in the environment and kept in no record.
        secret_config: settings with secrets for a file that only the user can read, passed by ``--config``.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    added: tuple[AddedFlag, ...] = ()
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_config: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ShutdownPolicy:
    """How to stop a server.

    Attributes:
        repeat_term_s: while loading, one SIGTERM may be ignored: send it again this often.
        loading_kills_engine: SIGKILL its engine to abort a load, the quickest clean way.
        engine_term_s: after the API server is gone, an engine is given SIGTERM and this long to leave.
        drain_s: how long a serving API server may take to drain before SIGKILL.
    """

    repeat_term_s: float = 3.0
    loading_kills_engine: bool = False
    engine_term_s: float = 8.0
    drain_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as asked for and as in effect, for ``verify``."""

    name: str
    asked: str | None
    effective: str | None
    evidence: str
    missing_flag: str | None = None  # the flag that would make it known
    tolerance: float = 0.0  # relative: pools are rounded down to whole pages


def known_setting(
    name: str, asked: str | None, effective: object, evidence: str, missing_flag: str | None = None
) -> Setting:
    """A ``Setting`` whose ``effective`` is any value as text; None and an empty string mean not known."""
    text = None if effective is None or effective == "" else str(effective)
    return Setting(name, asked, text, evidence, missing_flag)


class Server(Protocol):
    """One server program."""

    name: str
    distributions: tuple[str, ...]  # names of its Python package
    health_path: str
    health_generates: bool  # the health check itself generates a token
    shutdown_policy: ShutdownPolicy
    pause_paths: tuple[str, ...]  # asked when a server that is up does not generate
    info_paths: tuple[str, ...]  # asked for the settings in effect
    flush_path: str | None  # POST to it drops the device copies of cached pages, and nothing else
    api_key_variable: str  # from which it reads the API key; empty: it only has a flag
    evidence_flag: str  # without this flag the server does not report which tier cached tokens came from

    def flags(self, request: StartRequest) -> tuple[str, ...]:
        """``request`` as this server's flags, the user's own flags last.

        Raises:
            UsageError: something in the request has no flag in this server.
        """

    def finalize_command(
        self, argv: Sequence[str], env: Mapping[str, str], installation: Installation, *, gpus: int
    ) -> Launch:
        """Turn a planned command into one that runs on this installation, and add the flags that evidence needs.

        Args:
            gpus: number of accelerators of the machine; with 0 the server starts on the CPU.
        """

    def env_for_planning(self, installation: Installation) -> Mapping[str, str]:
        """Environment variables by which the planner recognises this installation; the command keeps them."""

    def roles(self, processes: Sequence[ProcessView], api_server: int) -> dict[int, Role]:
        """pid -> role for ``processes``: the tree under the pid ``api_server``, orphans included."""

    def read_health(self, answer: ServerAnswer) -> HealthReading:
        """Read an answer of ``health_path``."""

    def read_pause(self, answers: Mapping[str, ServerAnswer]) -> str | None:
        """Evidence that generation was paused on request, from the answers of ``pause_paths``; None: not paused,
        or unknown.
        """

    def build_probe_request(self, model: str | None, prompt: str = "1, 2, 3,", tokens: int = 1) -> ProbeRequest:
        """A greedy request for ``tokens`` tokens."""

    def read_token(self, answer: ServerAnswer) -> TokenReading:
        """Read the answer to a request of ``build_probe_request``."""

    def counters(self, metrics: str) -> Counters:
        """The counters in the text of /metrics."""

    def info(self, answers: Mapping[str, ServerAnswer], metrics: str) -> Mapping[str, object]:
        """The settings in effect, from the answers of ``info_paths`` and the text of /metrics;
        input of ``settings``.
        """

    def offload_tiers(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The tiers below the device that ``argv`` asks for. A hit in any of them shows that the cache works."""

    def settings(self, argv: Sequence[str], info: Mapping[str, object] | None, counters: Counters) -> list[Setting]:
        """Each setting as asked for in ``argv`` and as in effect by ``info`` and ``counters``."""
