"""Requests in, batches out: the loop that decides what each step computes.

submit -> waiting -> running (prefill, then decode) -> finished
             ^          |
             '----------' preempted: pages given back, tokens kept; recomputed or found in the cache later
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from forebay.engine.cache.interface import PrefixCacheProtocol
from forebay.engine.config import SchedulerConfig
from forebay.engine.ipc.messages import TokenEvent
from forebay.engine.model_executor.step import Runner, SampledToken, StepResult
from forebay.engine.scheduler.batch import ScheduleBatch, schedule_batch
from forebay.engine.scheduler.budget import StepBudget
from forebay.engine.scheduler.queue import WaitingQueue
from forebay.engine.scheduler.sequence import Sequence

__all__ = ["Scheduler", "StepOutcome"]

_RETRY_S = 0.05
"""After no page was to be had and none was given back since: how soon to ask again (a transfer may have ended)."""
_SHARED_PAGES = 4
"""A prefix of fewer pages is cheaper to compute twice than to wait for."""


@dataclass(slots=True)
class StepOutcome:
    """What one step did."""

    events: list[TokenEvent] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    seconds: float = 0.0


class Scheduler:
    """Continuous batching over a prefix cache and a runner. One thread calls it.

    Args:
        cache: where pages come from; the scheduler is its only user.
        runner: executes the batches.
        config: limits.
        page_size: token slots a page.
    """

    def __init__(self, cache: PrefixCacheProtocol, runner: Runner, config: SchedulerConfig, *, page_size: int) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.num_preemptions = 0
        self._cache = cache
        self._runner = runner
        self._config = config
        self._page_size = page_size
        self._budget = StepBudget(config.chunk_size, config.step_target_s)
        self._blocked_until = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def num_loading(self) -> int:
        """Running sequences whose prefix is still on its way to the device."""
        return sum(s.gate is not None for s in self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller has made sure that it can fit the device pool alone."""
        self.waiting.add(sequence)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences and free their pages now; unknown ids (finished already) are fine."""
        for seq_id in seq_ids:
            if self.waiting.remove(seq_id) is None:
                for sequence in [s for s in self.running if s.seq_id == seq_id]:
                    self._release(sequence)

    def step(self) -> StepOutcome | None:
        """Plan, execute and settle one step; None when nothing could run now."""
        self._cache.process_completions()
        if self._make_room():
            self._admit()
        decoding = sum(s.is_decoding for s in self.running)
        pending = sum(s.remaining for s in self.running) - decoding
        batch = schedule_batch(self.running, self._budget.prefill_tokens(decoding, pending))
        if batch is None:
            return None
        started = time.perf_counter()
        result = self._runner.execute(batch.to_step())
        return self._settle(batch, result, time.perf_counter() - started)

    def _make_room(self) -> bool:
        """Give every running sequence pages for its next token, preempting the youngest; False when some were."""
        calm = True
        for sequence in list(self.running):
            while sequence.lease is not None and not self._reserve(sequence, sequence.length):
                self._preempt(self.running[-1])
                calm = False
        return calm

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for ``num_tokens`` positions of ``sequence``."""
        if num_tokens <= sequence.reserved:
            return True
        assert sequence.lease is not None
        if not self._cache.extend(sequence.lease, num_tokens):
            return False
        sequence.reserved = -(-num_tokens // self._page_size) * self._page_size
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._release(sequence)
        self.waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self._cache.close(sequence.lease)
        sequence.closed()
        self.running.remove(sequence)
        self._blocked_until = 0.0

    def _admit(self) -> None:
        """Waiting sequences start, oldest first, while there are places and pages.

        Nobody overtakes a sequence that waits for pages; one that waits for a prefix which another is just computing
        is passed by.
        """
        if time.monotonic() < self._blocked_until:
            return
        for sequence in self.waiting:
            if len(self.running) >= self._config.max_running:
                return
            if self._is_prefix_being_computed(sequence):
                continue
            if not self._start(sequence):
                self._blocked_until = time.monotonic() + _RETRY_S
                return

    def _start(self, sequence: Sequence) -> bool:
        """Open a lease with pages for all tokens so far and one page to grow into; False: no pages now."""
        lease = self._cache.open(sequence.tokens)
        if lease is None:
            return False
        sequence.opened(lease)
        if not self._reserve(sequence, min(sequence.length + self._page_size, sequence.most_tokens)):
            self._cache.close(lease)
            sequence.closed()
            return False
        self.waiting.remove(sequence.seq_id)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.seq_id)
        return True

    def _is_prefix_being_computed(self, sequence: Sequence) -> bool:
        """True while a running prefill is about to compute a long prefix that ``sequence`` needs as well."""
        tokens = sequence.tokens
        for other in self.running:
            if other.remaining <= self._page_size:
                continue
            ahead = other.computed + _SHARED_PAGES * self._page_size
            if min(len(tokens), other.length) >= ahead and np.array_equal(tokens[:ahead], other.tokens[:ahead]):
                return True
        return False

    def _settle(self, batch: ScheduleBatch, result: StepResult, seconds: float) -> StepOutcome:
        """Take over what a step computed: commit pages, append tokens, end what is over."""
        if result.failed_gates:
            self._drop_failed_loads(batch, result.failed_gates)
            return StepOutcome(seconds=seconds)
        outcome = StepOutcome([], batch.prefill_tokens, batch.num_decoding, seconds)
        if not batch.gates:
            self._budget.measured(batch.num_decoding, batch.prefill_tokens, seconds)
            if batch.prefill_tokens and not batch.num_decoding:
                self._cache.note_prefill(batch.prefill_tokens, seconds)
        for sequence, count, sampled in zip(batch.members, batch.counts, result.tokens, strict=True):
            before = sequence.computed // self._page_size
            sequence.computed += count
            if sequence.computed // self._page_size > before:
                assert sequence.lease is not None
                self._cache.commit(sequence.lease, sequence.tokens[: sequence.computed])
            if sampled is not None:
                outcome.events.append(self._append(sequence, sampled))
        return outcome

    def _append(self, sequence: Sequence, sampled: SampledToken) -> TokenEvent:
        is_first = sequence.num_output == 0
        finish = sequence.append(sampled.token_id)
        if finish is not None:
            self._release(sequence)
        cached = sequence.cached if is_first else None
        return TokenEvent(
            sequence.seq_id,
            sampled.token_id,
            finish,
            sampled.logprob,
            sampled.top_logprobs,
            None if cached is None else (cached.device, cached.host, cached.disk),
        )

    def _drop_failed_loads(self, batch: ScheduleBatch, failed: tuple[int, ...]) -> None:
        """The step wrote nothing that counts; sequences whose load failed compute that prefix themselves."""
        gates = [batch.gates[index] for index in failed]
        for sequence in self.running:
            if any(sequence.gate is gate for gate in gates):
                assert sequence.lease is not None
                sequence.load_failed(self._cache.fail_load(sequence.lease))
