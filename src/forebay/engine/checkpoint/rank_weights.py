"""A rank's weights: slices of a checkpoint's tensors, fused, packed into the back end's layout, and dropped.

Every linear layer is asked for by the names of its parts; how a part is stored (dense, INT4, FP8, int8) is read from
the tensors themselves, so that a quantization config's ``ignore`` list is honoured by construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from forebay.engine.checkpoint.checkpoint import Checkpoint, Progress
from forebay.engine.checkpoint.quantized_weights import (
    QuantizedPart,
    QuantScheme,
    quantized_shape,
    read_quantized,
    scheme_of,
)
from forebay.engine.distributed.collectives import Comm
from forebay.engine.kernels.interface import KernelBackend, PackedLinear
from forebay.errors import UsageError

__all__ = ["LinearPart", "RankWeights", "shard"]

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One weight of a fused linear.

    Args:
        name: the module's name, without ``.weight``.
        rows: output rows [a, b) that this rank keeps; None: all.
    """

    name: str
    rows: Range | None = None


def shard(count: int, rank: int, tp: int, *, what: str) -> Range:
    """The rank's share [a, b) of ``count`` things.

    Raises:
        UsageError: not divisible, with the numbers of ranks that work.
    """
    if count % tp:
        works = [n for n in range(1, count + 1) if count % n == 0 and n <= 16]
        raise UsageError(
            f"{count} {what} cannot be divided over {tp} ranks", fix=f"--tp {' or '.join(map(str, works[-4:]))}"
        )
    return rank * count // tp, (rank + 1) * count // tp


class RankWeights:
    """Reads, slices, fuses and packs.

    Args:
        checkpoint: the tensors.
        backend: whose layout linears are packed into.
        dtype: the model's dtype.
        comm: which rank we are, of how many.
        progress: called after each tensor with bytes read and in total.

    Names are those of a plain causal language model (``model.layers.0...``, ``lm_head``); in a multimodal checkpoint
    they are found under its language model's prefix.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: KernelBackend,
        dtype: torch.dtype,
        *,
        comm: Comm,
        progress: Progress | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.backend = backend
        self.dtype = dtype
        self.rank, self.tp = comm.rank, comm.size
        self._body, self._head = _prefixes(checkpoint)
        self.nbytes = 0
        """Bytes of this rank's weights so far, as packed."""
        self._progress = progress
        ours = (self._body, f"{self._head}lm_head.")
        self.total_bytes = sum(e.nbytes for name, e in checkpoint.entries.items() if name.startswith(ours))
        self._done = 0
        self._counted: set[str] = set()
        self._scratch = torch.empty(0, dtype=dtype)

    def has(self, name: str) -> bool:
        return self._full(name) in self.checkpoint

    def tensor(
        self, name: str, *, rows: Range | None = None, cols: Range | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor or its slice, in the model's dtype unless ``dtype`` says otherwise; counted in ``nbytes``."""
        tensor = self.read(name, rows=rows, cols=cols).to(dtype or self.dtype)
        self.nbytes += tensor.numel() * tensor.element_size()
        return tensor

    def read(
        self, name: str, *, rows: Range | None = None, cols: Range | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``Checkpoint.read``, with the prefix and the progress."""
        full = self._full(name)
        tensor = self.checkpoint.read(full, rows=rows, cols=cols, out=out)
        if full not in self._counted:
            self._counted.add(full)
            self._done += self.checkpoint[full].nbytes
            if self._progress is not None:
                self._progress(self._done, self.total_bytes)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint[self._full(name)].shape

    def scheme(self, module: str) -> QuantScheme | None:
        """How ``module``'s weight is stored; None: dense."""
        return scheme_of(self.checkpoint, self._full(module))

    def linear(self, parts: Sequence[LinearPart], *, cols: Range | None = None, bias: bool = True) -> PackedLinear:
        """One packed linear of the parts' rows, one below the other.

        Args:
            parts: what to fuse.
            cols: input columns [a, b) this rank keeps; None: all.
            bias: whether a bias that the checkpoint has is added (a row-parallel linear adds it on one rank only).
        """
        schemes = {self.scheme(part.name) for part in parts}
        if len(schemes) > 1:
            raise UsageError(f"{', '.join(p.name for p in parts)} are stored in different formats and cannot be fused")
        scheme = schemes.pop()
        fused_bias = self._fused_bias(parts, bias)
        if scheme is None:
            packed = self._dense(parts, cols, fused_bias)
        else:
            packed = self._quantized(scheme, parts, cols, fused_bias)
        self.nbytes += packed.nbytes
        return packed

    def dense(self, part: LinearPart, cols: Range | None = None) -> torch.Tensor:
        """A part's weight in the model's dtype, dequantised if it must be (small matrices that are transformed)."""
        scheme = self.scheme(part.name)
        if scheme is None:
            weight = self.read(f"{part.name}.weight", rows=part.rows, cols=cols)
        else:
            weight = read_quantized(self.read, self.shape, scheme, part.name, part.rows, cols).dense()
        return weight.to(self.dtype)

    def _full(self, name: str) -> str:
        """The checkpoint's name for ours."""
        return self._body + name[len("model.") :] if name.startswith("model.") else self._head + name

    def _dense(self, parts: Sequence[LinearPart], cols: Range | None, bias: torch.Tensor | None) -> PackedLinear:
        """The parts, read a stretch of rows at a time while they are packed."""
        spans = _stacked([_count(part.rows, self.shape(f"{part.name}.weight")[0]) for part in parts])
        width = _count(cols, self.shape(f"{parts[0].name}.weight")[1])

        def read(first: int, last: int) -> dict[str, torch.Tensor]:
            fused = self._room(last - first, width)
            for part, at, rows in _overlaps(parts, spans, first, last):
                name, target = f"{part.name}.weight", fused[at : at + rows[1] - rows[0]]
                if self.checkpoint[self._full(name)].dtype == self.dtype:
                    self.read(name, rows=rows, cols=cols, out=target)
                else:
                    target.copy_(self.read(name, rows=rows, cols=cols))
            return {"weight": fused}

        return self.backend.pack_rows(None, (spans[-1][1], width), read, bias)

    def _room(self, rows: int, cols: int) -> torch.Tensor:
        """Where a weight is put together: the same memory each time, unless the packed form is going to keep it."""
        if getattr(self.backend, "keeps_weights", True):
            return torch.empty(rows, cols, dtype=self.dtype)
        if self._scratch.numel() < rows * cols:
            self._scratch = torch.empty(rows * cols, dtype=self.dtype)
        return self._scratch[: rows * cols].view(rows, cols)

    def _fused_bias(self, parts: Sequence[LinearPart], wanted: bool) -> torch.Tensor | None:
        if not wanted or not any(self.has(f"{part.name}.bias") for part in parts):
            return None
        biases = []
        for part in parts:
            if self.has(f"{part.name}.bias"):
                biases.append(self.read(f"{part.name}.bias", rows=part.rows).to(self.dtype))
            else:
                biases.append(torch.zeros(_count(part.rows, self.shape(f"{part.name}.weight")[0]), dtype=self.dtype))
        return torch.cat(biases)

    def _quantized(
        self, scheme: QuantScheme, parts: Sequence[LinearPart], cols: Range | None, bias: torch.Tensor | None
    ) -> PackedLinear:
        shapes = [quantized_shape(self.shape, scheme, part.name) for part in parts]
        spans = _stacked([_count(part.rows, shape[0]) for part, shape in zip(parts, shapes)])
        width = _count(cols, shapes[0][1])

        def read_part(part: LinearPart, rows: Range) -> QuantizedPart:
            return read_quantized(self.read, self.shape, scheme, part.name, rows, cols)

        def read(first: int, last: int) -> dict[str, torch.Tensor]:
            found = [read_part(part, rows).tensors for part, _, rows in _overlaps(parts, spans, first, last)]
            return found[0] if len(found) == 1 else {key: torch.cat([each[key] for each in found]) for key in found[0]}

        if bias is None and all(scheme.can_stack(end - begin) for begin, end in spans[:-1]):
            return self.backend.pack_rows(scheme.kernel, (spans[-1][1], width), read)
        # A bias, or scale blocks that straddle two parts: there is no packed form, so this one linear is dense.
        whole = [read_part(part, rows).dense() for part, _, rows in _overlaps(parts, spans, 0, spans[-1][1])]
        return self.backend.pack_linear(torch.cat(whole).to(self.dtype), bias)


def _stacked(counts: Sequence[int]) -> list[Range]:
    """Each part's rows [a, b) in the fused matrix."""
    ends = list(itertools.accumulate(counts))
    return [(end - count, end) for count, end in zip(counts, ends)]


def _overlaps(
    parts: Sequence[LinearPart], spans: Sequence[Range], first: int, last: int
) -> Iterator[tuple[LinearPart, int, Range]]:
    """The parts in rows [first, last) of the fused matrix: each with its place among these rows,
    and its own rows there.
    """
    for part, (begin, end) in zip(parts, spans):
        low, high = max(first, begin), min(last, end)
        if low < high:
            offset = (0 if part.rows is None else part.rows[0]) - begin
            yield part, low - first, (low + offset, high + offset)


def _count(span: Range | None, size: int) -> int:
    return size if span is None else span[1] - span[0]


def _prefixes(checkpoint: Checkpoint) -> tuple[str, str]:
    """What stands for ``model.`` in this checkpoint, and what comes before ``lm_head``.

    ``model.`` and nothing; in multimodal checkpoints ``language_model.model.`` and ``language_model.`` (as published),
    or ``model.language_model.`` and nothing (as transformers saves them).
    """
    tail = "embed_tokens.weight"
    found = [name.removesuffix(tail) for name in checkpoint.names() if name.endswith(f".{tail}")]
    if len(found) != 1:
        raise UsageError(f"{checkpoint.folder} has {len(found)} tensors named *.{tail}, one is needed")
    body = found[0]
    return body, body.removesuffix("model.") if body == "model." or body.endswith(".model.") else ""
