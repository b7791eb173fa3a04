"""A server that is none of the three: only what OpenAI's API and a health path promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.errors import UsageError
from forebay.servers.base import (
    Condition,
    Counters,
    HealthReading,
    Launch,
    ProbeRequest,
    ProcessView,
    Role,
    Setting,
    ShutdownPolicy,
    StartRequest,
    TokenReading,
)
from forebay.servers.http_client import ServerAnswer
from forebay.servers.install import Installation
from forebay.servers.openai_api import completion_request, read_completion, refused_or_silent
from forebay.servers.process_roles import tree_roles

__all__ = ["UnknownServer"]


class UnknownServer:
    """A server that is watched and never started by Forebay."""

    name = "unknown"
    distributions: tuple[str, ...] = ()
    health_path = "/health"
    health_generates = False
    shutdown_policy = ShutdownPolicy()
    pause_paths: tuple[str, ...] = ()
    info_paths: tuple[str, ...] = ()
    flush_path: str | None = None
    api_key_variable = ""
    evidence_flag = ""

    def flags(self, request: StartRequest) -> tuple[str, ...]:
        """Never: there is no command to build."""
        raise UsageError("an unknown server cannot be started", fix="name one with --server")

    def finalize_command(
        self, argv: Sequence[str], env: Mapping[str, str], installation: Installation, *, gpus: int
    ) -> Launch:
        """Never, as ``flags``."""
        raise UsageError("an unknown server cannot be started", fix="name one with --server")

    def env_for_planning(self, installation: Installation) -> Mapping[str, str]:
        """None."""
        return {}

    def roles(self, processes: Sequence[ProcessView], api_server: int) -> dict[int, Role]:
        """The listener is the API server; nothing is known of the others."""
        return tree_roles(processes, api_server, {})

    def read_health(self, answer: ServerAnswer) -> HealthReading:
        """2xx is up. No /health at all (404) is no reason to call it down: the token decides."""
        if answer.status is None:
            return refused_or_silent(answer, self.health_path)
        up = answer.ok or answer.status == 404
        return HealthReading(Condition.UP if up else Condition.UNHEALTHY, answer.describe(self.health_path))

    def read_pause(self, answers: Mapping[str, ServerAnswer]) -> str | None:
        """No way to ask."""
        return None

    def build_probe_request(self, model: str | None, prompt: str = "1, 2, 3,", tokens: int = 1) -> ProbeRequest:
        """``POST /v1/completions``."""
        return completion_request(model, prompt, tokens)

    def read_token(self, answer: ServerAnswer) -> TokenReading:
        """See ``Server.read_token``."""
        return read_completion(answer)

    def counters(self, metrics: str) -> Counters:
        """None are known."""
        return Counters()

    def info(self, answers: Mapping[str, ServerAnswer], metrics: str) -> Mapping[str, object]:
        """Nothing is known."""
        return {}

    def offload_tiers(self, argv: Sequence[str]) -> tuple[str, ...]:
        """None are known."""
        return ()

    def settings(self, argv: Sequence[str], info: Mapping[str, object] | None, counters: Counters) -> list[Setting]:
        """None are known."""
        return []
