"""What every family is built from: the context it is built in, the step it runs, embedding,
head and linears by rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from forebay.engine.checkpoint.rank_weights import LinearPart, RankWeights
from forebay.engine.distributed.collectives import Comm
from forebay.engine.kernels.interface import AttentionBatch, KernelBackend, PackedLinear
from forebay.engine.memory.workspace import Views, Workspace
from forebay.errors import UsageError
from forebay.kv.spec import LayerGroup

__all__ = ["Embedding", "ForwardContext", "LMHead", "LoadBackFailed", "ModelContext", "RowLinear"]


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a block needs while it is being built."""

    weights: RankWeights
    workspace: Workspace
    backend: KernelBackend
    comm: Comm
    dtype: torch.dtype
    groups: tuple[LayerGroup, ...]
    """The KV spec's layer groups: the planner's, so that the sizes it promised are the sizes we allocate."""

    def group_of(self, layer: int) -> int:
        """The index of the group that ``layer``'s KV belongs to."""
        return next(i for i, group in enumerate(self.groups) if layer in group.layers)


class LoadBackFailed(Exception):
    """A page this step reads did not arrive; the step is abandoned (one rank only: see ``ForwardContext.wait``)."""


@dataclass(slots=True)
class ForwardContext:
    """One step as the models see it.

    Args:
        tokens: int32 (M,).
        batches: for each layer group, where queries and keys are.
        views: scratch at M rows.
        last_rows: int64 (S,), the rows whose logits are wanted, each its sequence's last; None: all M.
        final: those rows as a step of their own, whose queries read what all rows have written; None: there are none.
        wait: called with a layer's number just before the layer reads or writes KV; None: nothing is arriving.
    """

    tokens: torch.Tensor
    batches: list[AttentionBatch]
    views: Views
    last_rows: torch.Tensor | None = None
    final: ForwardContext | None = None
    wait: Callable[[int], None] | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    """This step's rows of the rotary tables, where the first layer that needs them leaves them for the others."""


class RowLinear:
    """A linear whose input is split over the ranks: the partial results are summed in fp32 and rounded once.

    Args:
        build: the context.
        linear: this rank's columns; its bias, if any, on rank 0 only.
    """

    def __init__(self, build: ModelContext, linear: PackedLinear) -> None:
        self.linear = linear
        self._backend = build.backend
        self._comm = build.comm
        self._partial = build.workspace.register("partial", (linear.out_features,), torch.float32)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, views: Views) -> None:
        if self._comm.size == 1:
            self._backend.linear(x, self.linear, out)
            return
        partial = views[self._partial]
        self._backend.linear(x, self.linear, partial)
        self._comm.all_reduce(partial, out)


def vocabulary_shard(size: int, rank: int, tp: int) -> tuple[int, int]:
    """The rank's rows [a, b) of a vocabulary of ``size``; the last ranks may have fewer, or none."""
    each = -(-size // tp)
    return min(size, rank * each), min(size, (rank + 1) * each)


class Embedding:
    """The token table, its rows split over the ranks; every rank gets every row through a sum with zeros.

    Args:
        build: the context.
        name: the module's name.
        vocab_size: rows over all ranks.
        output: the output matrix's name; where the checkpoint has none, or ``tied``, this table is it too, and is kept
            once, packed.
        tied: as in the config.
        scale: of the embeddings (Gemma).
    """

    def __init__(
        self, build: ModelContext, name: str, vocab_size: int, *, output: str, tied: bool, scale: float | None = None
    ) -> None:
        comm, weights = build.comm, build.weights
        self.first, self.last = vocabulary_shard(vocab_size, comm.rank, comm.size)
        self.packed: PackedLinear | None = None
        """The table as the output matrix, where it is that."""
        if weights.scheme(name) is not None:
            raise UsageError(
                f"{name} is stored quantized, which Forebay does not read for a token table",
                fix="use a checkpoint whose embeddings are not quantized",
            )
        if tied or (not weights.has(f"{output}.weight") and weights.scheme(output) is None):
            self.packed = weights.linear([LinearPart(name, (self.first, self.last))])
            hidden = self.packed.in_features
        else:
            self._table = weights.tensor(f"{name}.weight", rows=(self.first, self.last))
            hidden = self._table.shape[1]
        self._backend = build.backend
        self._comm = comm
        self._scale = None if scale is None else torch.tensor(scale, dtype=build.dtype)
        self._partial = build.workspace.register("partial", (hidden,), torch.float32)

    def __call__(self, tokens: torch.Tensor, out: torch.Tensor, views: Views) -> None:
        table = self._table if self.packed is None else self.packed
        if self._comm.size == 1:
            self._backend.embed(table, tokens, out)
        else:
            partial = views[self._partial]
            self._backend.embed_part(table, tokens, (self.first, self.last), partial)
            self._comm.all_reduce(partial, out)
        if self._scale is not None:
            out.mul_(self._scale)


class LMHead:
    """Logits, the vocabulary split over the ranks; rank 0 gets all of them, in fp32."""

    def __init__(self, build: ModelContext, name: str, vocab_size: int, embedding: Embedding) -> None:
        comm = build.comm
        self.vocab_size = vocab_size
        first, last = embedding.first, embedding.last
        self.linear = embedding.packed or build.weights.linear([LinearPart(name, (first, last))])
        self._backend = build.backend
        self._comm = comm
        self._logits = build.workspace.register("logits", (last - first,), torch.float32)
        self._all = build.workspace.register("all_logits", (vocab_size,), torch.float32)

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """Logits (S, vocabulary) of x (S, H); on other ranks than 0 only this rank's part."""
        logits = views[self._logits]
        self._backend.linear(x, self.linear, logits)
        if self._comm.size == 1:
            return logits
        together = views[self._all] if self._comm.rank == 0 else None
        self._comm.gather_columns(logits, -(-self.vocab_size // self._comm.size), together)
        return logits if together is None else together
