"""The pre-norm decoder that most families are: x += attention(norm(x)); x += mlp(norm(x))."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from forebay.engine.memory.device_pool import DevicePool
from forebay.engine.models.layers import Embedding, ForwardContext, LMHead, ModelContext
from forebay.engine.models.rotary import RopeSettings, rope_tables
from forebay.kv.spec import LayerGroup

__all__ = ["Block", "Decoder", "Layer", "Model"]

Rope = tuple[torch.Tensor, torch.Tensor]


class Block(Protocol):
    """An attention block: bound to its pools once; each step it writes KV, and then reads it."""

    group: int

    def bind(self, pools: Sequence[torch.Tensor], rope: Rope) -> None: ...

    def write(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """From normed rows (M, H): KV into the pools, and the rows' queries (M, heads, ...)."""

    def read(self, query: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """What the queries find, projected: (M, H) in scratch."""


class Model(Protocol):
    """What the runner drives."""

    vocab_size: int
    groups: tuple[LayerGroup, ...]
    replayable: bool
    """Whether a step is nothing but operations of the back end (see ``runtime.decode``)."""

    def bind(self, pool: DevicePool, max_positions: int) -> None:
        """Take the pool, and make the rotary tables for positions below ``max_positions``."""

    def forward(self, step: ForwardContext) -> torch.Tensor | None:
        """Logits (S, vocabulary) on rank 0, in scratch; None where nothing samples."""


class Layer:
    """One decoder layer's parts; ``Decoder.forward`` calls them."""

    def __init__(
        self,
        attention: Block,
        mlp: Callable[[torch.Tensor, ForwardContext], torch.Tensor],
        input_norm: torch.Tensor,
        post_norm: torch.Tensor,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.input_norm = input_norm
        self.post_norm = post_norm


class Decoder:
    """Embedding, layers, norm, head. Rows that do not sample leave when the last layer has written their KV.

    Args:
        build: the context.
        rope: the rotary settings of each layer group.
        rope_dtype: of the rotary tables; None: the model's.
        replayable: whether every block is nothing but operations of the back end.
    """

    def __init__(
        self,
        build: ModelContext,
        *,
        rope: Sequence[RopeSettings],
        layers: Sequence[Layer],
        embedding: Embedding,
        head: LMHead,
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

    def bind(self, pool: DevicePool, max_positions: int) -> None:
        tables = [rope_tables(rope, max_positions, self._rope_dtype) for rope in self.rope]
        for index, group in enumerate(self.groups):
            for layer, pools in zip(group.layers, pool.tensors[index]):
                self.layers[layer].attention.bind(pools, tables[index])

    def forward(self, step: ForwardContext) -> torch.Tensor | None:
        views, backend, eps, wait = step.views, self._backend, self.eps, step.wait
        x, residual = views[self._x], views[self._residual]
        self.embedding(step.tokens, residual, views)
        backend.rms_norm(residual, self.layers[0].input_norm, eps, x)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if wait is not None:
                wait(index)
            query = layer.attention.write(x, step)
            if index == last and step.last_rows is not None:
                # The other rows have written their KV, and nothing else of theirs is wanted.
                if step.final is None:
                    return None
                query = query.index_select(0, step.last_rows)
                residual = residual.index_select(0, step.last_rows)
                step = step.final
                x = step.views[self._x]
            hidden = layer.attention.read(query, step)
            backend.add_rms_norm(hidden, residual, layer.post_norm, eps, x)
            hidden = layer.mlp(x, step)
            norm = self.layers[index + 1].input_norm if index < last else self.final_norm
            backend.add_rms_norm(hidden, residual, norm, eps, x)
        return self.head(x, step.views)
