"""How many prompt tokens a step may compute: from measured step times.

A step with d decoding sequences and p prompt tokens is taken to last decode(d) + p x per_token. Both are running
averages of what was measured; decode(d) is kept per power of two of d, because a decoding step's time hardly depends on
d until it does. Large chunks are faster a token (2,048 at once took 0.8 of the time of four times 512 here), so that a
step without decoding sequences is as large as a second allows: a new request waits no longer than that.

Beside decoding sequences a step is short while little prompt is pending, and grows with it: every step pays for
decode(d), so that under load many short steps would spend more on that than on the prompts that everybody waits for (16
conversations at 3,000 tokens: 60 ms of decoding beside 55 prompt tokens).
"""

from __future__ import annotations

__all__ = ["StepBudget"]

_WEIGHT = 0.2
"""Of a new measurement in a running average."""
_LEAST = 32
"""Prompt tokens a step gets however late it is: prefill must go on."""
_GRAIN = 16
"""Budgets are multiples of this, so that chunks end on page borders for the usual page sizes."""
_ALONE_S = 1.0
"""How long a step may last that keeps no decoding sequence waiting."""
_ALONE_LEAST = 512
"""Prompt tokens such a step gets on however slow a model."""
_BACKLOG = 0.25
"""Of the time that the pending prompts take, how much one step may,
beside decoding sequences (at most ``_ALONE_S``).
"""


class StepBudget:
    """Measures steps and sizes the next one.

    Args:
        chunk_size: most prompt tokens a step.
        target_s: how long a step may last while others decode and little prompt is pending.
    """

    def __init__(self, chunk_size: int, target_s: float) -> None:
        self._chunk_size = chunk_size
        self._target_s = target_s
        self._decode_s: dict[int, float] = {}
        self._per_token_s: float | None = None

    def prefill_tokens(self, num_decoding: int, pending: int = 0) -> int:
        """Prompt tokens that the next step may compute beside ``num_decoding`` decoding sequences, with ``pending``
        prompt tokens in the running sequences."""
        if num_decoding == 0 or self._per_token_s is None:
            in_time = 0 if self._per_token_s is None else int(_ALONE_S / self._per_token_s) // _GRAIN * _GRAIN
            return min(self._chunk_size, max(_ALONE_LEAST, in_time))
        target_s = max(self._target_s, min(_ALONE_S, _BACKLOG * pending * self._per_token_s))
        spare_s = target_s - self._expected_decode_s(num_decoding)
        fitting = int(spare_s / self._per_token_s) // _GRAIN * _GRAIN
        return max(min(_LEAST, self._chunk_size), min(self._chunk_size, fitting))

    def measured(self, num_decoding: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from a step that waited for no transfer."""
        if prefill_tokens == 0:
            bucket = num_decoding.bit_length()
            self._decode_s[bucket] = _average(self._decode_s.get(bucket), seconds)
        elif prefill_tokens >= _LEAST:
            spent = max(seconds - self._expected_decode_s(num_decoding), seconds / 10)
            self._per_token_s = _average(self._per_token_s, spent / prefill_tokens)

    @property
    def prefill_rate(self) -> float | None:
        """Measured prompt tokens a second; None before the first measurement."""
        return None if self._per_token_s is None else 1.0 / self._per_token_s

    def _expected_decode_s(self, num_decoding: int) -> float:
        """The measured time of the nearest size; 0 before any measurement or without decoding."""
        if num_decoding == 0 or not self._decode_s:
            return 0.0
        bucket = num_decoding.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda known: abs(known - bucket))]


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
