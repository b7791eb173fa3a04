"""transformers in a process of its own: generate() in a batch, and a bare forward for prefill.

python transformers_peer.py MODEL '[[1, 4], [512]]'
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    streams, prefills = json.loads(sys.argv[2])
    torch.set_num_threads(2)
    rows: dict[str, list[float]] = {}
    with torch.inference_mode():
        for count in streams:
            ids = torch.randint(100, 48000, (count, 16))
            model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=128, min_new_tokens=128, do_sample=False)
            rows[f"{count} streams"] = [count * 128 / (time.perf_counter() - start)]
        for length in prefills:
            rows[f"prefill {length}"] = []
            for _ in range(3):
                ids = torch.randint(100, 48000, (1, length))
                start = time.perf_counter()
                model(ids, logits_to_keep=1)
                rows[f"prefill {length}"].append(length / (time.perf_counter() - start))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
