"""The pre-norm decoder that most families are: x += attention(norm(x)); x += mlp(norm(x))."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from forebay.engine.models.parts import Build, Embedding, Head, Step
from forebay.engine.runtime.device_pool import DevicePool
from forebay.engine.runtime.rotary import RopeSettings, rope_tables
from forebay.engine.runtime.workspace import Views
from forebay.planning.kv_spec import LayerGroup

__all__ = ["Block", "Decoder", "Layer", "Model"]

Rope = tuple[torch.Tensor, torch.Tensor]


class Block(Protocol):
    """An attention block: bound to its pools once, called each step."""

    group: int

    def bind(self, pools: Sequence[torch.Tensor], rope: Rope) -> None: ...

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor: ...


class Model(Protocol):
    """What the runner drives."""

    vocab_size: int
    groups: tuple[LayerGroup, ...]
    replayable: bool
    """Whether a step is nothing but operations of the back end (see ``runtime.decode``)."""

    def bind(self, pool: DevicePool, max_positions: int) -> None:
        """Take the pool, and make the rotary tables for positions below ``max_positions``."""

    def forward(self, step: Step, sample_views: Views) -> torch.Tensor | None:
        """Logits (S, vocabulary) on rank 0, in scratch; None where nothing samples."""


class Layer:
    """One decoder layer's parts; ``Decoder.forward`` calls them."""

    def __init__(
        self,
        attention: Block,
        mlp: Callable[[torch.Tensor, Step], torch.Tensor],
        input_norm: torch.Tensor,
        post_norm: torch.Tensor,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.input_norm = input_norm
        self.post_norm = post_norm


class Decoder:
    """Embedding, layers, norm, head. Rows that do not sample leave after the last layer's attention has their KV.

    Args:
        build: the context.
        rope: the rotary settings of each layer group.
        rope_dtype: of the rotary tables; None: the model's.
        replayable: whether every block is nothing but operations of the back end.
    """

    def __init__(
        self,
        build: Build,
        *,
        rope: Sequence[RopeSettings],
        layers: Sequence[Layer],
        embedding: Embedding,
        head: Head,
        final_norm: torch.Tensor,
        eps: float,
        rope_dtype: torch.dtype | None = None,
        replayable: bool = False,
    ) -> None:
        self.replayable = replayable
        self.groups = build.groups
        self.vocab_size = head.vocab_size
        self.rope = tuple(rope)
        self.layers = list(layers)
        self.embedding, self.head = embedding, head
        self.final_norm, self.eps = final_norm, eps
        self._backend = build.backend
        self._rope_dtype = rope_dtype or build.dtype
        hidden = final_norm.shape[0]
        ws = build.workspace
        self._x = ws.register("x", (hidden,), build.dtype)
        self._residual = ws.register("residual", (hidden,), build.dtype)
        self._picked = ws.register("picked", (hidden,), build.dtype)

    def bind(self, pool: DevicePool, max_positions: int) -> None:
        tables = [rope_tables(rope, max_positions, self._rope_dtype) for rope in self.rope]
        for index, group in enumerate(self.groups):
            for layer, pools in zip(group.layers, pool.tensors[index]):
                self.layers[layer].attention.bind(pools, tables[index])

    def forward(self, step: Step, sample_views: Views) -> torch.Tensor | None:
        views, backend, eps, wait = step.views, self._backend, self.eps, step.wait
        x, residual = views[self._x], views[self._residual]
        self.embedding(step.tokens, residual, views)
        backend.rms_norm(residual, self.layers[0].input_norm, eps, x)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if wait is not None:
                wait(index)
            hidden = layer.attention(x, step)
            backend.add_rms_norm(hidden, residual, layer.post_norm, eps, x)
            hidden = layer.mlp(x, step)
            if index < last:
                backend.add_rms_norm(hidden, residual, self.layers[index + 1].input_norm, eps, x)
        return self._logits(hidden, residual, step, sample_views)

    def _logits(
        self, hidden: torch.Tensor, residual: torch.Tensor, step: Step, sample_views: Views
    ) -> torch.Tensor | None:
        if step.num_samples == 0:
            return None
        x = sample_views[self._x]
        if step.sample_rows is not None:
            # ``picked`` and the residual's own scratch at S rows: index_select may not write what it reads.
            hidden = hidden.index_select(0, step.sample_rows)
            residual = torch.index_select(residual, 0, step.sample_rows, out=sample_views[self._picked])
        self._backend.add_rms_norm(hidden, residual, self.final_norm, self.eps, x)
        return self.head(x, sample_views)
