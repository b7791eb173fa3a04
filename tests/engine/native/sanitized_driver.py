"""Runs every kernel of a sanitized library (argv[1]) once on ragged shapes;
a finding ends the process with an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from forebay.engine.distributed.collectives import KernelComm, SharedMemoryComm, shared_buffer
from forebay.engine.kernels.interface import AttentionBatch
from forebay.engine.kernels.library import load_library, variants_of
from forebay.engine.kernels.native_backend import NativeBackend


def run(backend: NativeBackend, dtype: torch.dtype) -> None:
    for rows, n, k in ((1, 17, 33), (0, 5, 8), (70, 50, 96), (130, 64, 40)):
        x, out = torch.randn(rows, k).to(dtype), torch.empty(rows, n, dtype=dtype)
        backend.linear(x, backend.pack_linear(torch.randn(n, k).to(dtype), torch.randn(n)), out)
    for rows in (1, 66):
        x = torch.randn(rows, 96).to(dtype)
        int4 = {
            "weight_packed": torch.randint(-(2**31), 2**31, (40, 12)).int(),
            "weight_scale": torch.rand(40, 3).bfloat16(),
        }
        fp8 = {"weight": torch.randn(40, 96).to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(1, 1)}
        int8 = {"weight": torch.randint(-128, 128, (40, 96)).to(torch.int8), "weight_scale": torch.rand(40, 1)}
        packed = [
            backend.pack_quantized(scheme, tensors, (40, 96))
            for scheme, tensors in (("int4_g32", int4), ("fp8_block", fp8), ("int8", int8))
        ]
        for weight in packed:
            backend.linear(x, weight, torch.empty(rows, 40, dtype=dtype))
            backend.gated_linear(x, weight, torch.empty(rows, 20, dtype=dtype))
        starts = torch.tensor([0, rows, rows, rows + 1], dtype=torch.int32)
        index = torch.zeros(rows + 1, dtype=torch.int32)
        backend.grouped_linear(x, packed, index, starts, torch.empty(rows + 1, 40, dtype=dtype))
        backend.gated_linear(x, backend.pack_linear(torch.randn(96, 96).to(dtype)), torch.empty(rows, 48, dtype=dtype))
    attention(backend, dtype)
    x, out = torch.randn(9, 2 * 21).to(dtype), torch.empty(9, 21, dtype=dtype)
    backend.silu_mul(x, out)
    backend.gelu_tanh_mul(x, out)
    backend.rms_norm(out, torch.ones(21).to(dtype), 1e-5, out, gemma=True)
    backend.add_rms_norm(out, out.clone(), torch.ones(21).to(dtype), 1e-5, out)
    backend.embed(torch.randn(4, 21).to(dtype), torch.zeros(9, dtype=torch.int32), out)
    table = torch.randn(300, 21).to(dtype)
    packed = backend.pack_rows(None, (300, 21), lambda first, last: {"weight": table[first:last]})
    backend.embed(packed, torch.full((9,), 299, dtype=torch.int32), out)
    backend.embed_part(packed, torch.full((9,), 299, dtype=torch.int32), (0, 300), torch.empty(9, 21))
    ranks(backend, dtype)
    backend.combine(out, torch.zeros(5, 2, dtype=torch.int64) + 8, torch.rand(5, 2), torch.empty(5, 21))
    backend.argmax(torch.randn(3, 37), torch.empty(3, dtype=torch.int64))


def ranks(backend: NativeBackend, dtype: torch.dtype) -> None:
    """One rank's ends of the exchanges: nobody to wait for."""
    comm = KernelComm(SharedMemoryComm(0, 1, shared_buffer(1, slot_bytes=4096)), backend)
    comm.all_reduce(torch.randn(3, 1000), torch.empty(3, 1000, dtype=dtype))
    comm.gather_columns(torch.randn(5, 300), 301, torch.empty(5, 300))


def attention(backend: NativeBackend, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, page_size, pages = 6, 2, 24, 3, 60
    starts, lengths = [0, 5, 6, 6], [5, 120, 1]
    table = torch.full((3, 41), -1, dtype=torch.int32)
    table[0, :2] = torch.tensor([58, 59])
    table[1, :40] = torch.arange(40)
    table[2, :1] = 50
    batch = AttentionBatch(
        table,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.arange(6) * 7,
        torch.arange(6).int(),
        page_size,
    )
    pools = torch.zeros(2, pages, kv_heads, page_size, dim, dtype=dtype)
    q, k = torch.randn(6, heads, dim).to(dtype), torch.randn(6, kv_heads, dim).to(dtype)
    tables = torch.randn(2, 10, dim // 2).to(dtype)
    backend.rope_store(q, k, k, tables[0], tables[1], batch, pools[0], pools[1])
    out = torch.empty_like(q)
    backend.attention(q, pools[0], pools[1], batch, 0.2, out)
    backend.attention(q, pools[0], pools[1], batch, 0.2, out, window=7, softcap=5.0)
    latent = torch.zeros(pages, 1, page_size, dim, dtype=dtype)
    backend.latent_store(torch.randn(6, dim).to(dtype), batch, latent)
    backend.latent_attention(q, latent, batch, 0.2, 20, torch.empty(6, heads, 20, dtype=dtype))


def main() -> None:
    path = Path(sys.argv[1])
    library = load_library(path)
    for variant in variants_of(library):
        backend = NativeBackend(library, path, variant, 2)
        for dtype in (torch.bfloat16, torch.float32):
            run(backend, dtype)
    print("all kernels ran")


if __name__ == "__main__":
    main()
