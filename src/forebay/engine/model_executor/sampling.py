"""From logits to tokens, one row at a time: a row's token never depends on the other rows.

Order: banned tokens and penalties on the logits; temperature; ``top_k``; ``top_p`` over what is left, renormalised;
``min_p`` relative to the most likely token. The draw inverts the cumulative distribution at a number that depends on
(seed, position) only. Log-probabilities are of the model's own distribution, before penalties, temperature and filters
(vLLM's default).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.engine.model_executor.step import SampledToken, SeqStep
from forebay.engine.sampling_params import SamplingParams

__all__ = ["all_greedy", "sample", "uniform"]

Floats = npt.NDArray[np.float32]
_MASK = (1 << 64) - 1
_BLOCK = 512
"""Tokens summed together in the first pass of an unfiltered draw."""
_FIRST_CANDIDATES = 256
_LARGEST = float(np.finfo(np.float32).max) / 4
_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: their distribution has all its mass on the most likely token."""


def sample(logits: Floats, seqs: list[SeqStep]) -> list[SampledToken]:
    """One token for each row of ``logits`` (rows, vocabulary); the rows are scratch and may be overwritten.

    Args:
        logits: fp32, row i for ``seqs[i]``.
        seqs: the sequences, whose ``start + len(tokens)`` is the position of the sampled token.
    """
    if all_greedy(seqs):
        return [SampledToken(token) for token in logits.argmax(axis=1).tolist()]
    return [_sample_row(row, seq) for row, seq in zip(logits, seqs)]


def all_greedy(seqs: list[SeqStep]) -> bool:
    """Whether every sequence just takes its most likely token."""
    return all(_is_plain_greedy(seq) for seq in seqs)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of the splitmix64 finaliser, 53 bits kept."""
    return (_mix(_mix(seed & _MASK) ^ (position & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_plain_greedy(seq: SeqStep) -> bool:
    params = seq.sampling
    return (
        (params.temperature < _GREEDY_BELOW or params.top_k == 1)
        and params.logprobs is None
        and not seq.banned_tokens
        and not params.has_penalty
    )


def _sample_row(row: Floats, seq: SeqStep) -> SampledToken:
    params = seq.sampling
    raw = row.copy() if params.logprobs is not None else row
    if params.has_penalty:
        _penalise(row, seq)
    if seq.banned_tokens:
        row[np.asarray(seq.banned_tokens)] = -np.inf
    if params.temperature < _GREEDY_BELOW or params.top_k == 1:
        token = int(row.argmax())
    else:
        token = _draw(row, params, uniform(params.seed, seq.start + len(seq.tokens)))
    if params.logprobs is None:
        return SampledToken(token)
    return _with_logprobs(raw, token, params.logprobs)


def _penalise(row: Floats, seq: SeqStep) -> None:
    """OpenAI's presence and frequency penalties over the output; repetition (CTRL's) over prompt and output."""
    params = seq.sampling
    output = np.asarray(seq.output if seq.output is not None else (), dtype=np.int64)
    if params.repetition_penalty != 1.0:
        prompt = seq.prompt if seq.prompt is not None else np.empty(0, dtype=np.int32)
        seen = np.unique(np.concatenate((prompt.astype(np.int64), output)))
        values = row[seen].astype(np.float64)
        scaled = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[seen] = np.clip(scaled, -_LARGEST, _LARGEST)  # a penalty near 0 must not make infinities
    if len(output) and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(output, return_counts=True)
        row[seen] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


def _draw(row: Floats, params: SamplingParams, point: float) -> int:
    row = row - row.max()
    row *= np.float32(1.0 / params.temperature)
    weights: Floats = np.exp(row)
    if 0 < params.top_k < len(weights) or params.top_p < 1.0:
        return _draw_filtered(weights, params, point)
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0  # the most likely token's weight is exactly 1
    return _draw_any(weights, point)


def _draw_any(weights: Floats, point: float) -> int:
    """Invert the cumulative distribution in vocabulary order, first by blocks and then within one."""
    starts = np.arange(0, len(weights), _BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = point * blocks[-1]
    block = min(int(np.searchsorted(blocks, target, side="right")), len(blocks) - 1)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = blocks[block - 1] if block else 0.0
    return block * _BLOCK + _invert(inside, target - before)


def _draw_filtered(weights: Floats, params: SamplingParams, point: float) -> int:
    """The exact top-k and top-p set, found among as few of the most likely tokens as it takes."""
    size = len(weights)
    limit = params.top_k if 0 < params.top_k < size else size
    total = None if limit < size else float(weights.sum(dtype=np.float64))
    count = limit if limit <= 4096 else _FIRST_CANDIDATES
    while True:
        order = _most_likely(weights, min(count, size))[:limit]
        kept = weights[order]
        sums = np.cumsum(kept, dtype=np.float64)
        mass = total if total is not None else (float(sums[-1]) if len(order) == limit else None)
        if mass is not None and (sums[-1] >= params.top_p * mass or len(order) >= limit):
            break
        count *= 8
    before = sums - kept
    number = max(1, int(np.count_nonzero((before < params.top_p * mass) & (kept >= params.min_p))))
    return int(order[_invert(kept[:number], point * float(sums[number - 1]))])


def _most_likely(weights: Floats, count: int) -> npt.NDArray[np.int64]:
    """At least ``count`` tokens, most likely first, equals by id; all that tie with the last one are in."""
    size = len(weights)
    if count >= size:
        chosen = np.arange(size)
    else:
        threshold = np.partition(weights, size - count)[size - count]
        chosen = np.flatnonzero(weights >= threshold)
    order: npt.NDArray[np.int64] = chosen[np.argsort(-weights[chosen], kind="stable")]
    return order


def _invert(weights: Floats, target: float) -> int:
    """The first index whose cumulative weight exceeds ``target``; never one of weight 0."""
    sums = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(sums, target, side="right"))
    if index >= len(weights):
        index = int(np.flatnonzero(weights)[-1])
    return index


def _with_logprobs(raw: Floats, token: int, count: int) -> SampledToken:
    wide: npt.NDArray[Any] = raw.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best = _most_likely(raw, count)[:count] if count else np.empty(0, dtype=np.int64)
    return SampledToken(token, float(wide[token]), tuple((int(i), float(wide[i])) for i in best))
