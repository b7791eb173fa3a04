"""One sequence: its tokens, how far they are computed, and when it is over."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.engine.cache.interface import CachedTokens, Lease
from forebay.engine.model_executor.step import SeqStep
from forebay.engine.sampling_params import SamplingParams

__all__ = ["Sequence"]

Int32Array = npt.NDArray[np.int32]


class Sequence:
    """A prompt and what is generated from it.

        tokens:   [ prompt .................. | output ........ ]
                  0        computed           prompt_len        length
                  | KV in the lease's pages | still to compute  |

    Decoding is the case where exactly one token, the last sampled one, is still to compute.

    Args:
        seq_id: the front's number for it.
        prompt: token ids; at least one.
        sampling: how tokens are chosen, and when it ends.
    """

    def __init__(self, seq_id: int, prompt: Int32Array, sampling: SamplingParams) -> None:
        self.seq_id = seq_id
        self.prompt_len = len(prompt)
        self.length = len(prompt)
        self.computed = 0
        self.reserved = 0
        """Positions for which the lease has pages, as far as we know."""
        self.lease: Lease | None = None
        self.cached: CachedTokens | None = None
        """What the first opening found; a reopening after preemption does not change it."""
        self._buffer = np.empty(max(64, len(prompt) + min(sampling.max_tokens, 256)), dtype=np.int32)
        self._buffer[: len(prompt)] = prompt
        self._sampling = sampling

    @property
    def tokens(self) -> Int32Array:
        """Prompt and output; a view."""
        return self._buffer[: self.length]

    @property
    def num_output(self) -> int:
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to compute; 1 while decoding."""
        return self.length - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.remaining == 1 and self.num_output > 0

    @property
    def most_tokens(self) -> int:
        """Positions it can ever need (the last token's KV is never computed)."""
        return self.prompt_len + self._sampling.max_tokens - 1

    @property
    def gate(self) -> Any | None:
        """The transfer its prefix still waits for."""
        return self.lease.layer_events if self.lease is not None else None

    def opened(self, lease: Lease) -> None:
        """Take up a lease: its cached prefix needs no computing."""
        self.lease = lease
        self.computed = lease.cached.total
        self.reserved = self.computed
        if self.cached is None:
            self.cached = lease.cached

    def closed(self) -> None:
        """The lease is gone (finished, cancelled or preempted): nothing is computed any more."""
        self.lease = None
        self.computed = self.reserved = 0

    def load_failed(self, good: int) -> None:
        """Only ``good`` tokens of the cached prefix arrived, and the lease says so; the rest counts as computed."""
        assert self.lease is not None
        self.computed = good
        self.reserved = 0
        if self.num_output == 0:
            self.cached = self.lease.cached

    def step(self, count: int) -> SeqStep:
        """The step that computes the next ``count`` tokens."""
        assert self.lease is not None
        stop = self.computed + count
        sampling = self._sampling
        penalised = sampling.has_penalty and stop == self.length
        return SeqStep(
            seq_id=self.seq_id,
            tokens=self._buffer[self.computed : stop],
            start=self.computed,
            page_tables=self.lease.page_tables,
            sample=stop == self.length,
            sampling=sampling,
            banned_tokens=sampling.stop_token_ids if self.num_output < sampling.min_tokens else (),
            prompt=self._buffer[: self.prompt_len] if penalised else None,
            output=self._buffer[self.prompt_len : self.length].tolist() if penalised else None,
        )

    def append(self, token: int) -> str | None:
        """Add a sampled token; returns why the sequence ends with it (``stop``, ``length``), or None."""
        if self.length == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.length] = token
        self.length += 1
        sampling = self._sampling
        if token in sampling.stop_token_ids and self.num_output > sampling.min_tokens:
            return "stop"
        return "length" if self.num_output >= sampling.max_tokens else None
