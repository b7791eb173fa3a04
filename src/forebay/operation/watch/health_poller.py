"""The requests of a watch: health, one token, counters, pause. Each runs in a thread, at most one of a kind at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from forebay.machine.interface import Machine
from forebay.operation.watch.observation import TokenState
from forebay.servers.base import Condition, Counters, HealthReading, Server, TokenReading
from forebay.servers.http_client import Address, ServerAnswer, send
from forebay.servers.openai_api import first_model

__all__ = ["HealthPoller"]

_HEALTH_S = 30.0  # SGLang takes 20 s to say that its scheduler does not answer
_TOKEN_S = 900.0
_SLOW_HEALTH_S = 0.2  # a health check that takes longer is generating a token itself: the server is nearly up


@dataclass
class _Slot:
    """One kind of request, and when the one under way began."""

    busy_since: float | None = None


class HealthPoller:
    """Sends the requests to one server and keeps the last answer of each kind.

    Args:
        clock: monotonic seconds.
        wake: set whenever an answer has come, so that the watcher need not wait for its next turn.
    """

    def __init__(
        self, machine: Machine, server: Server, address: Address, clock: Callable[[], float], wake: threading.Event
    ) -> None:
        self._machine = machine
        self._server = server
        self._address = address
        self._clock = clock
        self._wake = wake
        self._health_slot, self._token_slot, self._counters_slot, self._pause_slot = _Slot(), _Slot(), _Slot(), _Slot()
        self._model: str | None = None
        self.health: HealthReading | None = None
        self.health_at: float | None = None
        self.token = TokenState()
        self.counters: Counters | None = None
        self.counters_at: float | None = None
        self.paused: str | None = None

    def poll_health(self) -> None:
        """Request ``health_path``, unless a request is outstanding."""
        self._start(self._health_slot, self._health)

    def request_token(self) -> None:
        """Request one token, unless a request is outstanding."""
        if self._token_slot.busy_since is None:
            state = self.token
            self.token = TokenState(self._clock(), state.ok_at, state.failure, state.evidence)
        self._start(self._token_slot, self._one_token)

    def poll_counters(self) -> None:
        """Request /metrics, unless a request is outstanding."""
        self._start(self._counters_slot, self._read_counters)

    def poll_pause(self) -> None:
        """Request ``pause_paths``, unless a request is outstanding."""
        self._start(self._pause_slot, self._read_pause)

    @property
    def health_pending_s(self) -> float:
        """How long the health request under way has been waiting; 0 when none is."""
        since = self._health_slot.busy_since
        return 0.0 if since is None else self._clock() - since

    @property
    def should_request_token(self) -> bool:
        """Health is up or slow to answer. Earlier, the token request would meet a server that still loads."""
        if self.health is None:
            # a server that opens its port when it is ready answers health and token at once
            return not self._server.health_generates or self.health_pending_s >= _SLOW_HEALTH_S
        if self.health.condition is Condition.UP:
            return True
        return self.health.condition is not Condition.REFUSED and self.health_pending_s >= _SLOW_HEALTH_S

    def reset(self) -> None:
        """Drop all answers: another process is behind the address now."""
        self.health, self.token, self.counters, self.paused, self._model = None, TokenState(), None, None, None

    def send(
        self, method: str, path: str, body: dict[str, object] | None = None, *, timeout_s: float = 10.0
    ) -> ServerAnswer:
        """Send one request and wait for its answer."""
        return send(self._machine, self._address, method, path, body, timeout_s=timeout_s)

    def _start(self, slot: _Slot, work: Callable[[], None]) -> None:
        if slot.busy_since is not None:
            return
        slot.busy_since = self._clock()

        def run() -> None:
            try:
                work()
            finally:
                slot.busy_since = None
                self._wake.set()

        threading.Thread(target=run, daemon=True).start()

    def _health(self) -> None:
        reading = self._server.read_health(self.send("GET", self._server.health_path, timeout_s=_HEALTH_S))
        self.health, self.health_at = reading, self._clock()

    def _one_token(self) -> None:
        if self._model is None:
            self._model = first_model(self.send("GET", "/v1/models"))
        request = self._server.build_probe_request(self._model)
        body = None if request.body is None else dict(request.body)
        reading = self._server.read_token(self.send(request.method, request.path, body, timeout_s=_TOKEN_S))
        self.token = self._after(reading)

    def _after(self, reading: TokenReading) -> TokenState:
        if reading.ok:
            return TokenState(None, self._clock(), None, reading.evidence)
        return TokenState(None, None, reading.evidence, "")

    def _read_counters(self) -> None:
        answer = self.send("GET", "/metrics")
        if answer.ok:
            self.counters, self.counters_at = self._server.counters(answer.text), self._clock()

    def _read_pause(self) -> None:
        answers = {path: self.send("GET", path, timeout_s=5.0) for path in self._server.pause_paths}
        found = self._server.read_pause(answers)
        still = self.paused is not None and not any(answer.ok for answer in list(answers.values())[:1])
        self.paused = found or (self.paused if still else None)
