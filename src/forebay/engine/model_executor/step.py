"""What the scheduler asks of the runner in one step, and what comes back.

The scheduler (rank 0) decides; every rank executes the same StepBatch. Only rank 0 samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forebay.engine.sampling_params import SamplingParams

__all__ = ["LayerEvents", "Runner", "SampledToken", "SeqStep", "StepBatch", "StepResult"]

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class SeqStep:
    """One sequence's part of a step: compute KV for ``tokens`` at positions start, start + 1, ...

    ``page_tables[g]`` maps page number (position // page_size) to a device page of layer group g; it covers at least
    ``start + len(tokens)`` positions. Entries a sliding window can no longer read are -1.
    """

    seq_id: int
    tokens: Int32Array
    start: int
    page_tables: list[Int32Array]
    sample: bool
    """True: the last token's logits are wanted and a token is sampled from them (rank 0)."""
    sampling: SamplingParams
    banned_tokens: tuple[int, ...] = ()
    """Never sampled in this step (the stop tokens before ``min_tokens``)."""
    prompt: Int32Array | None = None
    """All prompt tokens; only set when a penalty needs them."""
    output: list[int] | None = None
    """Tokens generated so far; only set when a penalty needs them."""


@dataclass(slots=True)
class StepBatch:
    """All sequences of one step. ``gates`` must be waited for layer by layer: their pages are still arriving."""

    seqs: list[SeqStep]
    gates: list[LayerEvents] = field(default_factory=list)


class LayerEvents(Protocol):
    """A transfer that fills pages this step reads."""

    ids: tuple[int, ...]
    """Names the loads on every rank: each rank makes its own gate over them."""
    timeout_s: float
    """Waiting allowed over all layers together."""

    def wait_layer(self, layer: int) -> bool:
        """Block until ``layer`` (the model's numbering) has arrived; False when the transfer failed."""

    def has_arrived(self, layer: int) -> bool:
        """True when ``wait_layer(layer)`` would return at once (a failed transfer too). Never blocks."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token; ``top_logprobs`` are (token id, log-probability), best first, when asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens[i]`` belongs to ``batch.seqs[i]``; None where it did not sample, or where a gate failed."""

    tokens: list[SampledToken | None]
    failed_gates: tuple[int, ...] = ()
    """Indices into ``batch.gates``; a failed gate's step wrote nothing anyone may use: the step is run again."""
    seconds: float = 0.0


class Runner(Protocol):
    """Executes steps on one rank's device."""

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step to its end."""
