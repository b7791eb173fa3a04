"""Rank 0's loop: messages in, steps, messages out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from forebay.engine.cache.interface import Tier
from forebay.engine.ipc.messages import Abort, FrontMessage, RpcRequest, RpcResponse, StepReport, Stop, Submit
from forebay.engine.ipc.sockets import Inbox, Outbox
from forebay.engine.scheduler.scheduler import Scheduler, StepOutcome
from forebay.engine.scheduler.sequence import Sequence
from forebay.engine.worker.engine import Engine
from forebay.errors import ForebayError

__all__ = ["EngineLoop"]

_STALLED_WAIT_S = 0.002
"""Nothing can run until a transfer ends."""
_TRANSFER_WAIT_S = 0.005
"""No requests, but the cache still moves pages."""
_IDLE_WAIT_S = 5.0
"""No requests, nothing moves: a message wakes us."""


class EngineLoop:
    """Drives the scheduler from the front's messages until told to stop.

    Args:
        engine: cache, runner and limits.
        inbox: from the front.
        outbox: to the front.
        on_step: told the number of steps done, for the heartbeat.
    """

    def __init__(
        self, engine: Engine, inbox: Inbox[FrontMessage], outbox: Outbox, on_step: Callable[[int], None]
    ) -> None:
        self._engine = engine
        self._cache = engine.cache
        self._inbox = inbox
        self._outbox = outbox
        self._on_step = on_step
        self._scheduler = Scheduler(
            engine.cache, engine.runner, engine.scheduler_config, page_size=engine.spec.page_size
        )
        self._steps = 0
        self._is_stopped = False

    def run(self) -> None:
        """Serve until Stop."""
        wait_s = 0.0
        while True:
            for message in self._inbox.drain(wait_s):
                self._handle(message)
            if self._is_stopped:
                return
            outcome = self._scheduler.step() if self._scheduler.has_work else None
            if outcome is not None:
                self._publish(outcome)
                wait_s = 0.0 if self._scheduler.has_work else _TRANSFER_WAIT_S
            elif self._scheduler.has_work:
                wait_s = _STALLED_WAIT_S
            else:
                self._cache.process_completions()
                wait_s = _TRANSFER_WAIT_S if self._cache.is_busy else _IDLE_WAIT_S

    def _publish(self, outcome: StepOutcome) -> None:
        self._steps += 1
        self._on_step(self._steps)
        self._outbox.send(
            StepReport(
                step=self._steps,
                seconds=outcome.seconds,
                prefill_tokens=outcome.prefill_tokens,
                decode_tokens=outcome.decode_tokens,
                events=outcome.events,
                **self._gauges(),
            )
        )

    def _handle(self, message: FrontMessage) -> None:
        match message:
            case Submit():
                prompt = np.frombuffer(message.prompt, dtype=np.int32)
                self._scheduler.submit(Sequence(message.seq_id, prompt, message.sampling))
            case Abort():
                self._scheduler.abort(message.seq_ids)
            case RpcRequest():
                self._outbox.send(self._answer(message))
            case Stop():
                self._is_stopped = True

    def _answer(self, call: RpcRequest) -> RpcResponse:
        try:
            return RpcResponse(call.call_id, self._call(call))
        except ForebayError as error:
            return RpcResponse(call.call_id, {}, error.message)

    def _call(self, call: RpcRequest) -> dict[str, Any]:
        if call.method == "stats":
            self._cache.process_completions()
            return {"requests": self._gauges(), "cache": self._cache.stats(), "steps": self._steps}
        if call.method == "cache":
            self._cache.process_completions()
            return self._engine.snapshot()
        if call.method == "flush":
            dropped = self._cache.flush(None if call.tier is None else Tier(call.tier))
            return {"dropped_pages": dropped, "page_size": self._engine.spec.page_size}
        if call.method == "check":
            self._cache.check()
            return {}
        raise ForebayError(f"unknown call {call.method}")

    def _gauges(self) -> dict[str, int]:
        loading = self._scheduler.num_loading
        return {
            "running": len(self._scheduler.running) - loading,
            "waiting": len(self._scheduler.waiting),
            "loading": loading,
            "preemptions": self._scheduler.num_preemptions,
        }
