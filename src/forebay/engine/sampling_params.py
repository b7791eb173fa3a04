"""How one sequence is sampled: the same record from the API server through the scheduler to the sampler."""

from __future__ import annotations

import msgspec

__all__ = ["SamplingParams"]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Settings of one sequence, with OpenAI's and SGLang's meanings; already checked against the model.

    ``seed`` is always set (the API server draws one when the client gives none): the random number for the token at
    position p depends on (seed, p) only, so that batching, preemption and restarts never change a sampled token.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    """None: none; n: the log-probability of the chosen token and of the n most likely ones."""
    max_tokens: int = 1
    """Tokens to generate at most; at least one."""
    min_tokens: int = 0
    """No stop token is sampled before this many."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence: the model's end tokens unless ``ignore_eos``, and the client's own."""

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
