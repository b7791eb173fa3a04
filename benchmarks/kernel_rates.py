"""How fast the native kernels are, beside torch's: rates and ratios on the shapes of a model.

    python -m benchmarks.kernel_rates [--variant amx] [--threads 2] [--seconds 1.0] [--json out.json]

Each pair is timed in turns, call by call, and the best call counts: on a shared machine the best is what the code can
do, and the ratio is what to read. Shapes are SmolLM2-135M's; weights rotate through copies so that they come from
memory as in a real step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from forebay.engine.kernels import load_backend
from forebay.engine.kernels.interface import AttentionBatch, KernelBackend

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
STREAM_BYTES = 300_000_000
"""Copies of a weight rotated through: more than any cache holds."""


def best_of(calls: dict[str, Callable[[int], None]], seconds: float) -> dict[str, float]:
    """Best time of each call in seconds, the calls taking turns for ``seconds`` in total."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call(0)
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 3:
        turn += 1
        for name, call in calls.items():
            began = time.perf_counter()
            call(turn)
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def product(backend: KernelBackend, rows: int, shape: tuple[int, int], seconds: float) -> dict[str, float]:
    """Seconds of one product, ours and torch's."""
    n, k = shape
    copies = max(1, STREAM_BYTES // (n * k * 2)) if rows <= 64 else 1
    weights = [torch.randn(n, k, dtype=torch.bfloat16) for _ in range(copies)]
    packed = [backend.pack_linear(weight) for weight in weights]
    x, out = torch.randn(rows, k, dtype=torch.bfloat16), torch.empty(rows, n, dtype=torch.bfloat16)
    return best_of(
        {
            "ours": lambda i: backend.linear(x, packed[i % copies], out),
            "torch": lambda i: F.linear(x, weights[i % copies]),
        },
        seconds,
    )


def attention(backend: KernelBackend, queries: int, context: int, seqs: int, seconds: float) -> dict[str, float]:
    """Seconds of one layer's attention (9 heads on 3, 64 wide) for ``seqs`` sequences, ours and torch's."""
    heads, kv_heads, dim, page = 9, 3, 64, 16
    pages = -(-context // page)
    k = torch.randn(seqs * pages, kv_heads, page, dim, dtype=torch.bfloat16)
    v = torch.randn_like(k)
    table = torch.randperm(seqs * pages).view(seqs, pages).int()
    rows = queries * seqs
    q, out = torch.randn(rows, heads, dim, dtype=torch.bfloat16), torch.empty(rows, heads, dim, dtype=torch.bfloat16)
    batch = AttentionBatch(
        table,
        torch.arange(0, rows + 1, queries, dtype=torch.int32),
        torch.full((seqs,), context, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int32),
        page,
    )
    dense = torch.randn(3, seqs, heads, context, dim, dtype=torch.bfloat16)
    query = dense[0, :, :, -queries:]

    def sdpa(_: int) -> None:
        F.scaled_dot_product_attention(query, dense[1], dense[2], is_causal=queries == context)

    return best_of(
        {"ours": lambda _: backend.attention(q, k, v, batch, dim**-0.5, out), "torch": sdpa},
        seconds,
    )


def measure(backend: KernelBackend, seconds: float) -> list[dict[str, object]]:
    """One record a case: name, unit, our rate, torch's rate, their ratio."""
    records: list[dict[str, object]] = []

    def add(name: str, unit: str, work: float, times: dict[str, float]) -> None:
        ours, theirs = work / times["ours"] / 1e9, work / times["torch"] / 1e9
        records.append({"case": name, "unit": unit, "ours": ours, "torch": theirs, "ratio": ours / theirs})
        print(f"{name:34} {ours:9.1f} {unit:8} torch {theirs:9.1f}   {ours / theirs:5.2f} x", flush=True)

    for rows in (1, 4, 16, 32):
        for name, (n, k) in SHAPES.items():
            add(f"linear {name} M={rows}", "GB/s", 2.0 * n * k, product(backend, rows, (n, k), seconds))
    for rows in (64, 128, 512, 2048):
        for name, (n, k) in SHAPES.items():
            if name != "head":
                work = 2.0 * rows * n * k
                add(f"linear {name} M={rows}", "GFLOP/s", work, product(backend, rows, (n, k), seconds))
    for queries, context, seqs in ((512, 512, 1), (2048, 2048, 1), (1, 256, 1), (1, 2048, 1), (1, 256, 32)):
        pairs = queries * context - queries * (queries - 1) / 2
        name = f"attention {seqs} x {queries} on {context}"
        add(name, "GFLOP/s", 4.0 * 9 * 64 * pairs * seqs, attention(backend, queries, context, seqs, seconds))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backend = load_backend(options.variant, threads=options.threads, progress=print)
    print(backend.info())
    with torch.inference_mode():
        records = measure(backend, options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps({"schema": 1, "backend": backend.info(), "records": records}, indent=1))


if __name__ == "__main__":
    main()
