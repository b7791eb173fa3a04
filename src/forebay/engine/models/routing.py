"""Which experts a token goes to, and with what weight.

In numpy, row by row in effect: torch's vectorised elementwise functions may round an element differently when it falls
into the tail of the tensor, and then a token's experts would depend on how many tokens are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Route", "Router", "group_limited", "noaux_tc", "softmax_top_k"]

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Route:
    """For each token its experts, ascending, (M, k), and their weights, fp32 (M, k)."""

    experts: npt.NDArray[np.int64]
    weights: Floats


Router = Callable[[Floats], Route]
"""From router logits (M, E), fp32."""


def softmax_top_k(k: int, *, normalise: bool, scale: float = 1.0) -> Router:
    """Mixtral, Qwen3-MoE, DeepSeek-V2 ``greedy``: the k largest probabilities; renormalised if asked."""

    def route(logits: Floats) -> Route:
        scores = _softmax(logits)
        return _weigh(_top(scores, k), scores, normalise, scale)

    return route


def group_limited(k: int, groups: int, kept: int, *, scale: float) -> Router:
    """DeepSeek-V2 ``group_limited_greedy``: only the ``kept`` groups with the largest probability compete."""

    def route(logits: Floats) -> Route:
        scores = _softmax(logits)
        best = _grouped(scores, groups).max(axis=-1)
        return _weigh(_top(_mask(scores, best, kept, 0.0), k), scores, False, scale)

    return route


def noaux_tc(k: int, groups: int, kept: int, bias: Floats, *, normalise: bool, scale: float) -> Router:
    """DeepSeek-V3 and Kimi-K2: sigmoid scores; a learned bias chooses (groups by their two best,
    then experts) but does not weigh.
    """

    def route(logits: Floats) -> Route:
        scores = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
        chosen = scores + bias
        if kept < groups:
            two_best = np.partition(_grouped(chosen, groups), -2, axis=-1)[..., -2:].sum(axis=-1)
            chosen = _mask(chosen, two_best, kept, -np.inf)
        return _weigh(_top(chosen, k), scores, normalise, scale, floor=1e-20)

    return route


def _softmax(logits: Floats) -> Floats:
    wide = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Floats = wide / wide.sum(axis=1, keepdims=True)
    return result


def _grouped(scores: Floats, groups: int) -> Floats:
    return scores.reshape(len(scores), groups, -1)


def _mask(scores: Floats, group_scores: Floats, kept: int, fill: float) -> Floats:
    """``scores`` with every expert outside the ``kept`` best groups replaced by ``fill``."""
    groups = group_scores.shape[1]
    allowed = np.zeros(group_scores.shape, dtype=bool)
    np.put_along_axis(allowed, np.argpartition(-group_scores, kept - 1, axis=1)[:, :kept], True, axis=1)
    masked: Floats = np.where(np.repeat(allowed, scores.shape[1] // groups, axis=1), scores, np.float32(fill))
    return masked


def _top(scores: Floats, k: int) -> npt.NDArray[np.int64]:
    chosen: npt.NDArray[Any] = (
        np.argpartition(-scores, k - 1, axis=1)[:, :k]
        if k < scores.shape[1]
        else (np.broadcast_to(np.arange(k), (len(scores), k)).copy())
    )
    chosen.sort(axis=1)
    return chosen


def _weigh(experts: npt.NDArray[np.int64], scores: Floats, normalise: bool, scale: float, floor: float = 0.0) -> Route:
    weights = np.take_along_axis(scores, experts, axis=1)
    if normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(floor))
    return Route(experts, (weights * np.float32(scale)).astype(np.float32))
