"""The native library as a ``KernelBackend``.

Every operation's arguments are packed into one small struct (declared in native/abi.h) and passed by pointer, so that a
call costs about a microsecond and the same bytes can be recorded and replayed. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

import torch

from forebay.engine.kernels.interface import AttentionBatch, PackedLinear, ReadRows
from forebay.engine.kernels.library import best_copy, load_library, variants_of
from forebay.engine.kernels.native.build import BuildError, build_library
from forebay.engine.kernels.packing import NativeLinear, WeightPacker

__all__ = ["NativeBackend", "NativeLinear", "open_native"]

_SPIN_US = 200
"""How long an idle thread spins before it sleeps: longer than the gap between two operations of a step."""

(
    _LINEAR,
    _GROUPED_LINEAR,
    _EMBED,
    _RMS_NORM,
    _ADD_RMS_NORM,
    _ROPE_STORE,
    _ATTENTION,
    _LATENT_STORE,
    _GATED,
    _ARGMAX,
    _PACK,
    _GATED_LINEAR,
    _EMBED_PACKED,
    _COMBINE,
    _EMBED_PART,
    _ALL_REDUCE,
    _GATHER_COLUMNS,
) = range(17)

RanksView = tuple[int, int, int, int, int]
_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_PROGRAM_HEAD = Struct("<2q")
_linear_args = Struct("<8q").pack
_grouped_args = Struct("<10q").pack
_embed_args = Struct("<6q").pack
_embed_packed_args = Struct("<5q").pack
_combine_args = Struct("<8q").pack
_embed_part_args = Struct("<9q").pack
_all_reduce_args = Struct("<9q").pack
_gather_columns_args = Struct("<11q").pack
_rms_norm_args = Struct("<7qd3q").pack
_add_rms_norm_args = Struct("<6qdq").pack
_rope_args = Struct("<20q").pack
_attention_args = Struct("<18q2d2q").pack
_latent_store_args = Struct("<6q").pack
_gated_args = Struct("<8q").pack
_argmax_args = Struct("<5q").pack


def open_native(
    variant: str | None, threads: int, progress: Callable[[str], None] | None = None
) -> tuple[NativeBackend | None, str]:
    """The back end with ``variant`` (None: the best), or None and the reason."""
    try:
        path = build_library(progress)
        if path is None:
            return None, "no C++ compiler (g++, c++ or clang++) on PATH"
        lib = load_library(path)
    except (BuildError, OSError) as error:
        return None, str(error)
    known = variants_of(lib)
    if variant is not None and variant not in known:
        return None, f"this machine and compiler give {', '.join(known)}"
    return NativeBackend(lib, path, variant or known[0], threads), ""


class NativeBackend:
    """Implements ``KernelBackend``; see there for what each operation does.

    Args:
        lib: the loaded library.
        path: its file, for ``info``.
        variant: one of ``variants()``.
        threads: compute threads, the caller included.
    """

    name = "native"
    keeps_weights = False
    """A packed linear is a copy: the tensor it was made from may be overwritten."""

    def __init__(self, lib: ctypes.CDLL, path: Path, variant: str, threads: int) -> None:
        self._lib, self._path = lib, path
        self.variant, self.threads = variant, threads
        self._engine = lib.fb_create(variant.encode(), threads, _SPIN_US)
        if self._engine is None:
            raise BuildError(f"{path} has no variant {variant} for this machine")
        self._call: Callable[[int | None, int, bytes], None] = lib.fb_call
        call, engine = lib.fb_call, self._engine
        self._packer = WeightPacker(lambda args: call(engine, _PACK, args))
        self._expert_tables: dict[int, tuple[list[PackedLinear], Any]] = {}

    def __del__(self) -> None:
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None:
            self._lib.fb_destroy(engine)

    @property
    def copy_runs(self) -> Callable[[int, int, int, int], object]:
        """The library's ``fb_copy_runs`` with this machine's best copy, for the cache's transfers."""
        return best_copy(self._lib)

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "variant": self.variant, "threads": self.threads, "library": str(self._path)}

    # Programs

    def record(self, run: Callable[[], None]) -> bytes:
        """Run ``run`` and record its operations with their arguments, to be repeated by ``replay``.

        The recording has operations of this back end only, with the addresses of their tensors. The tensors must not
        move, and all that changes from step to step must be in their contents.
        """
        parts: list[bytes] = []
        call = self._call

        def keep(engine: int | None, operation: int, args: bytes) -> None:
            parts.append(_PROGRAM_HEAD.pack(operation, len(args)) + args)
            call(engine, operation, args)

        self._call = keep
        try:
            run()
        finally:
            self._call = call
        return b"".join(parts)

    def replay(self, program: bytes) -> None:
        """Repeat recorded operations in one call."""
        self._lib.fb_program(self._engine, program, len(program))

    # Weights

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return self._packer.dense(weight, bias)

    def pack_quantized(self, scheme: str, tensors: dict[str, torch.Tensor], shape: tuple[int, int]) -> PackedLinear:
        return self._packer.quantized(scheme, tensors, shape)

    def pack_rows(
        self, scheme: str | None, shape: tuple[int, int], read: ReadRows, bias: torch.Tensor | None = None
    ) -> PackedLinear:
        return self._packer.rows(scheme, shape, read, bias)

    # Products

    def linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor) -> None:
        dtype = x.dtype
        if weight.dtype is not dtype and weight.dtype is not None:  # type: ignore[attr-defined]
            raise ValueError(f"x is {dtype}, the weight was packed for {weight.dtype}")  # type: ignore[attr-defined]
        self._call(
            self._engine,
            _LINEAR,
            _linear_args(
                weight.address, x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), out.stride(0),  # type: ignore[attr-defined]
                _DTYPES[dtype], _DTYPES[out.dtype],
            ),
        )  # fmt: skip

    def gated_linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, *, gelu: bool = False) -> None:
        """out (M, N / 2) = act(gate) * up, where [gate | up] = x @ weight.T + bias:
        the same bits as ``linear`` and then ``silu_mul`` (or ``gelu_tanh_mul``), without the wide matrix between them.
        """
        self._call(
            self._engine,
            _GATED_LINEAR,
            _linear_args(
                weight.address, x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), out.stride(0), gelu,  # type: ignore[attr-defined]
                _DTYPES[x.dtype],
            ),
        )  # fmt: skip

    def grouped_linear(
        self,
        x: torch.Tensor,
        weights: list[PackedLinear],
        rows: torch.Tensor,
        expert_start: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._call(
            self._engine,
            _GROUPED_LINEAR,
            _grouped_args(
                self._expert_table(weights), x.data_ptr(), out.data_ptr(), rows.data_ptr(), expert_start.data_ptr(),
                len(weights), x.stride(0), out.stride(0), _DTYPES[x.dtype], _DTYPES[out.dtype],
            ),
        )  # fmt: skip

    def _expert_table(self, weights: list[PackedLinear]) -> int:
        """Address of an array of the experts' descriptors. The list is kept with it, so that its id stays unique."""
        known = self._expert_tables.get(id(weights))
        if known is None:
            table = (ctypes.c_int64 * len(weights))(*(weight.address for weight in weights))  # type: ignore[attr-defined]
            known = self._expert_tables[id(weights)] = (weights, table)
        return ctypes.addressof(known[1])

    # Rows

    def embed(self, table: torch.Tensor | PackedLinear, tokens: torch.Tensor, out: torch.Tensor) -> None:
        if isinstance(table, NativeLinear):
            args = _embed_packed_args(
                table.address, tokens.data_ptr(), out.data_ptr(), tokens.shape[0], _DTYPES[out.dtype]
            )
            self._call(self._engine, _EMBED_PACKED, args)
            return
        assert isinstance(table, torch.Tensor)
        row_bytes = table.shape[1] * table.element_size()
        self._call(
            self._engine,
            _EMBED,
            _embed_args(
                table.data_ptr(), tokens.data_ptr(), out.data_ptr(), tokens.shape[0], row_bytes, table.shape[0]
            ),
        )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, gemma: bool = False
    ) -> None:
        inner = 1 if x.dim() == 2 else x.shape[1]
        self._call(
            self._engine,
            _RMS_NORM,
            _rms_norm_args(
                x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0] * inner, x.shape[-1], x.stride(0),
                out.stride(0), eps, gemma, _DTYPES[x.dtype], inner,
            ),
        )  # fmt: skip

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        rows, dim = x.shape
        self._call(
            self._engine,
            _ADD_RMS_NORM,
            _add_rms_norm_args(
                x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps, _DTYPES[x.dtype]
            ),
        )

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._gated(x, out, 0)

    def gelu_tanh_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._gated(x, out, 1)

    def _gated(self, x: torch.Tensor, out: torch.Tensor, gelu: int) -> None:
        rows, inner = out.shape
        self._call(
            self._engine,
            _GATED,
            _gated_args(x.data_ptr(), out.data_ptr(), rows, inner, x.stride(0), out.stride(0), gelu, _DTYPES[x.dtype]),
        )

    def combine(self, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        args = _combine_args(
            rows.data_ptr(), place.data_ptr(), weights.data_ptr(), out.data_ptr(), *place.shape, out.shape[1],
            _DTYPES[rows.dtype],
        )  # fmt: skip
        self._call(self._engine, _COMBINE, args)

    def embed_part(
        self, table: torch.Tensor | PackedLinear, tokens: torch.Tensor, rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        if isinstance(table, NativeLinear):
            source, dtype = (table.address, 0), table.dtype or out.dtype
        else:
            assert isinstance(table, torch.Tensor)
            source, dtype = (0, table.data_ptr()), table.dtype
        args = _embed_part_args(*source, tokens.data_ptr(), out.data_ptr(), *out.shape, *rows, _DTYPES[dtype])
        self._call(self._engine, _EMBED_PART, args)

    # Ranks (distributed/collectives.py): a view is (address, rank, size, header bytes, slot bytes) of the shared memory

    def all_reduce(self, view: RanksView, partial: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Comm.all_reduce``; both contiguous."""
        args = _all_reduce_args(*view, partial.data_ptr(), out.data_ptr(), partial.numel(), _DTYPES[out.dtype])
        self._call(self._engine, _ALL_REDUCE, args)

    def gather_columns(self, view: RanksView, part: torch.Tensor, each: int, out: torch.Tensor | None) -> None:
        """See ``Comm.gather_columns``; both contiguous."""
        address, columns = (0, 0) if out is None else (out.data_ptr(), out.shape[1])
        args = _gather_columns_args(*view, part.data_ptr(), address, *part.shape, each, columns)
        self._call(self._engine, _GATHER_COLUMNS, args)

    def argmax(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = index of the first largest of x[i]; x fp32 (M, N), out int64 (M,)."""
        self._call(
            self._engine, _ARGMAX, _argmax_args(x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], x.stride(0))
        )

    # Attention

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: AttentionBatch,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> None:
        rows, heads, dim = q.shape
        self._call(
            self._engine,
            _ROPE_STORE,
            _rope_args(
                q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), batch.slots.data_ptr(),
                batch.positions.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), rows, heads, k.shape[1], dim,
                v.shape[2], cos.shape[1], q.stride(0), k.stride(0), v.stride(0), batch.page_size, _DTYPES[q.dtype],
            ),
        )  # fmt: skip

    def attention(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        out: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        self._attend(q, k_pool, v_pool, v_pool.shape[3], batch, scale, out, window or 0, softcap or 0.0)

    def latent_store(self, latent: torch.Tensor, batch: AttentionBatch, pool: torch.Tensor) -> None:
        rows, width = latent.shape
        size = latent.element_size()
        self._call(
            self._engine,
            _LATENT_STORE,
            _latent_store_args(
                latent.data_ptr(), batch.slots.data_ptr(), pool.data_ptr(), rows, latent.stride(0) * size, width * size
            ),
        )

    def latent_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        value_dim: int,
        out: torch.Tensor,
    ) -> None:
        self._attend(q, pool, pool, value_dim, batch, scale, out, 0, 0.0)

    def _attend(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        value_dim: int,
        batch: AttentionBatch,
        scale: float,
        out: torch.Tensor,
        window: int,
        softcap: float,
    ) -> None:
        table = batch.page_table
        num_seqs = table.shape[0]
        self._call(
            self._engine,
            _ATTENTION,
            _attention_args(
                q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr(), table.data_ptr(),
                batch.query_start.data_ptr(), batch.context_len.data_ptr(), num_seqs, table.stride(0),
                batch.page_size, k_pool.shape[0], q.shape[1], k_pool.shape[1], q.shape[2], value_dim,
                v_pool.shape[3], q.stride(0), out.stride(0), scale, softcap, window, _DTYPES[q.dtype],
            ),
        )  # fmt: skip
