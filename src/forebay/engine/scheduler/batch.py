"""Which running sequences join the next step, and with how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forebay.engine.model_executor.step import StepBatch
from forebay.engine.scheduler.sequence import Sequence

__all__ = ["ScheduleBatch", "schedule_batch"]


@dataclass(slots=True)
class ScheduleBatch:
    """A StepBatch with the sequences it came from, in the same order."""

    members: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    gates: list[Any] = field(default_factory=list)
    num_decoding: int = 0
    prefill_tokens: int = 0

    def add(self, sequence: Sequence, count: int) -> None:
        """Let ``sequence`` compute its next ``count`` tokens."""
        self.members.append(sequence)
        self.counts.append(count)
        if sequence.is_decoding:
            self.num_decoding += 1
        else:
            self.prefill_tokens += count
        gate = sequence.gate
        if gate is not None and not any(gate is known for known in self.gates):
            self.gates.append(gate)

    def to_step(self) -> StepBatch:
        """What the runner executes."""
        return StepBatch([s.step(n) for s, n in zip(self.members, self.counts, strict=True)], list(self.gates))


def schedule_batch(running: list[Sequence], prefill_budget: int) -> ScheduleBatch | None:
    """All decoding sequences, then prompt chunks in order of admission while ``prefill_budget`` lasts.

    A sequence whose prefix is still being loaded joins once the first layer is there, so that others never wait for its
    transfer to begin; when nobody else could run, it joins at once and the step waits layer by layer. None: nobody
    runs.
    """
    batch = ScheduleBatch()
    loading: list[Sequence] = []
    for sequence in running:
        if not _has_begun_arriving(sequence):
            loading.append(sequence)
        elif sequence.is_decoding:
            batch.add(sequence, 1)
    for sequence in running:
        if sequence.is_decoding or sequence in loading:
            continue
        count = min(sequence.remaining, prefill_budget - batch.prefill_tokens)
        if count <= 0:
            break
        batch.add(sequence, count)
    if not batch.members and loading:
        batch.add(loading[0], min(loading[0].remaining, prefill_budget))
    return batch if batch.members else None


def _has_begun_arriving(sequence: Sequence) -> bool:
    gate = sequence.gate
    return gate is None or bool(gate.has_arrived(0))
