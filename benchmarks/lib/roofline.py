"""Ceilings measured on this machine in this run; as a program:
one JSON line of them for MODEL and each number of tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["prefill_roofline", "read_bandwidth"]


def _median(run: Callable[[], object], repeats: int = 9) -> float:
    """Seconds of a call: the median, as for the servers (on a shared machine the best call is nobody's usual speed)."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def read_bandwidth() -> float:
    """GB/s of both threads summing 1 GB."""
    import torch

    torch.set_num_threads(2)
    data = torch.zeros(1 << 28, dtype=torch.float32)
    return data.numel() * 4 / _median(lambda: data.sum(), 5) / 1e9


def prefill_roofline(model: Path, tokens: int) -> float:
    """Prompt tokens a second at torch's own speed for the model's linears.

    The linears over ``tokens`` rows (logits for the last position only), plus causal attention's operations
    (4 x heads x dim x tokens^2 / 2 a layer) at the rate those linears reached.
    """
    import torch

    torch.set_num_threads(2)
    config = json.loads((model / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    shapes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
    seconds, flops = 0.0, 0.0
    for out_features, in_features in shapes:
        x = torch.randn(tokens, in_features).bfloat16()
        w = torch.randn(out_features, in_features).bfloat16()
        seconds += layers * _median(lambda x=x, w=w: torch.nn.functional.linear(x, w))  # type: ignore[misc]
        flops += layers * 2.0 * tokens * out_features * in_features
    attention = layers * 4.0 * heads * dim * tokens * tokens / 2
    head = torch.randn(config["vocab_size"], hidden).bfloat16()
    row = torch.randn(1, hidden).bfloat16()
    logits = _median(lambda: torch.nn.functional.linear(row, head))
    return tokens / (seconds + attention / (flops / seconds) + logits)


if __name__ == "__main__":
    given = {f"prefill {n}": prefill_roofline(Path(sys.argv[1]), int(n)) for n in sys.argv[2:]}
    print(json.dumps({"read GB/s": read_bandwidth(), **given}))
