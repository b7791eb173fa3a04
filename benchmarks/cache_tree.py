"""The page tree at 1,000,000 pages against 10,000: match, insert and evict a 4k-token prefix.

    python benchmarks/cache_tree.py [--json out.json] [--sglang-python .../peers/sglang/bin/python]

Before each timed operation other memory is walked through, as a forward pass does between two requests, so that neither
tree is measured out of the processor's caches. The same key sets go to SGLang's radix cache (its Python and its Rust
tree core) in its own environment when its interpreter is given: operations are what a request does there, match_prefix
with lock and unlock, insert, evict of as many tokens.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 16
TOKENS = 4096
PREFIX = TOKENS // PAGE
RECIPE = Path(__file__).resolve().parents[1] / "scripts" / "peers" / "sglang"


def keys(pages: int, seed: int = 0) -> np.ndarray:
    """Sequences of 4,096 tokens that make about ``pages`` pages, four at a time sharing their first half; (n, 4096)."""
    rng = np.random.default_rng(seed)
    # Four sequences of PREFIX pages are 2.5 x PREFIX different ones.
    count = max(4, round(pages / (2.5 * PREFIX)) * 4)
    sequences = rng.integers(0, 32_000, (count, TOKENS), dtype=np.int32)
    for first in range(0, len(sequences), 4):
        sequences[first : first + 4, : TOKENS // 2] = sequences[first, : TOKENS // 2]
    return sequences


def cold() -> None:
    """Put other bytes into the processor's caches."""
    global _OTHER
    _OTHER += 1


_OTHER = np.zeros(48 * 2**20, dtype=np.uint8)


def measure_ours(sequences: np.ndarray, rounds: int) -> dict[str, float]:
    """Median microseconds of each operation, and bytes a page of the tree."""
    from forebay.engine.cache.config import CacheConfig
    from forebay.engine.cache.prefix_cache import PrefixCache
    from forebay.planning.kv_spec import KVSpec, LayerGroup, Part

    spec = KVSpec((LayerGroup("full", (0,), (Part("k", 1, 1, 2),)),), PAGE)
    before = resident_bytes()
    cache = PrefixCache(spec, CacheConfig(device_pages=(len(sequences) * PREFIX,)))
    for sequence in sequences:
        lease = cache.open(sequence)
        assert lease is not None
        assert cache.extend(lease, TOKENS)
        cache.commit(lease, sequence)
        cache.close(lease)
    pages = cache.tree.num_nodes
    bytes_a_page = (resident_bytes() - before) / pages
    spare = len(sequences) * PREFIX - pages
    fill = cache.open(np.full(1, -1, dtype=np.int32))
    assert fill is not None
    # The pages that sharing has saved: taken, so that an insertion has to evict.
    assert cache.extend(fill, spare * PAGE)
    times: dict[str, list[float]] = {"match": [], "evict": [], "insert": []}
    rng = np.random.default_rng(1)
    for _ in range(rounds):
        known = np.append(sequences[rng.integers(len(sequences) // 2, len(sequences))], np.int32(0))
        new = rng.integers(0, 32_000, TOKENS, dtype=np.int32)
        with timed(times["match"]):
            lease = cache.open(known)
            assert lease is not None
            cache.close(lease)
        lease = cache.open(new)
        assert lease is not None
        with timed(times["evict"]):
            assert cache.extend(lease, TOKENS)
        with timed(times["insert"]):
            cache.commit(lease, new)
        cache.close(lease)
    cache.check()
    return {**medians(times), "pages": pages, "bytes_a_page": bytes_a_page}


class timed:
    """Append the microseconds of a block, cold caches before it."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __enter__(self) -> None:
        cold()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._times.append((time.perf_counter() - self._started) * 1e6)


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name}_us": statistics.median(values) for name, values in times.items()}


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_sglang(core: str, sequences: np.ndarray, rounds: int) -> dict[str, Any]:
    """The same keys through SGLang's radix cache; runs in its own environment."""
    from array import array

    # What makes the CPU recipe's environment importable (scripts/peers/sglang/launch.py) does so here as well.
    spec = importlib.util.spec_from_file_location("recipe", RECIPE / "launch.py")
    assert spec is not None, "the recipe is not where it was"
    assert spec.loader is not None, "the recipe cannot be loaded"
    sys.modules["recipe"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["recipe"])
    # In place of this folder, whose kernels.py would be taken for the package of that name.
    sys.path[0] = str(RECIPE / "stubs")
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    class Allocator:
        """Counts what is freed; the tree is what is measured."""

        device = torch.device("cpu")
        page_size = PAGE

        def free(self, indices: Any) -> None:
            pass

        def free_segment(self, indices: Any, start_pos: int = 0) -> None:
            pass

    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=Allocator(),
        page_size=PAGE,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=core,
    )
    cache = UnifiedRadixCache(params)

    def key(tokens: np.ndarray) -> RadixKey:
        return RadixKey(array("q", tokens.tolist()), None)

    before = resident_bytes()
    for i, sequence in enumerate(sequences):
        value = torch.arange(i * TOKENS, (i + 1) * TOKENS, dtype=torch.int64)
        cache.insert(InsertParams(key=key(sequence), value=value))
    grown = resident_bytes() - before
    times: dict[str, list[float]] = {"match": [], "evict": [], "insert": []}
    rng = np.random.default_rng(1)
    for _ in range(rounds):
        known = key(sequences[rng.integers(len(sequences) // 2, len(sequences))])
        new = key(rng.integers(0, 32_000, TOKENS, dtype=np.int32))
        value = torch.arange(TOKENS, dtype=torch.int64)
        with timed(times["match"]):
            match = cache.match_prefix(MatchPrefixParams(key=known))
            cache.unlock(cache.lock(match.last_device_node))
        with timed(times["evict"]):
            cache.evict(EvictParams(num_tokens=TOKENS))
        with timed(times["insert"]):
            cache.insert(InsertParams(key=new, value=value))
    assert match.device_prefix_len >= TOKENS // 2, "the keys were not found"
    return {
        **medians(times),
        "bytes_a_page": grown / (len(sequences) * PREFIX * 5 // 8),
        "core": type(cache.tree_core).__name__,
    }


def in_environment(python: str, core: str, pages: int, rounds: int) -> dict[str, Any]:
    """``measure_sglang`` in SGLang's environment; what went wrong there, if it did."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [python, __file__, "--only", core, "--pages", str(pages), "--rounds", str(rounds), "--json", out.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        return dict(json.loads(Path(out.name).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000, help="of the large tree")
    parser.add_argument("--small", type=int, default=10_000, help="pages of the small tree")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sglang-python", help="interpreter of an environment with sglang (scripts/peers)")
    parser.add_argument("--only", choices=["python", "rust"], help=argparse.SUPPRESS)
    parser.add_argument("--json")
    args = parser.parse_args()
    # Collections of a tree of millions of objects are the server's business (it freezes them), not an operation's.
    gc.disable()
    report: dict[str, Any]
    if args.only:
        report = measure_sglang(args.only, keys(args.pages), args.rounds)
    else:
        report = compare(args)
        print(json.dumps(report, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Small against large, and against SGLang where there is one."""
    small = measure_ours(keys(args.small), args.rounds)
    large = measure_ours(keys(args.pages), args.rounds)
    operations = ("match_us", "insert_us", "evict_us")
    report: dict[str, Any] = {
        "small": small,
        "large": large,
        "large_over_small": {name: large[name] / small[name] for name in operations},
    }
    for core in ("python", "rust") if args.sglang_python else ():
        theirs = in_environment(args.sglang_python, core, args.pages, args.rounds)
        report[f"sglang_{core}"] = theirs
        if "error" not in theirs:
            report[f"ours_over_sglang_{core}"] = {name: large[name] / theirs[name] for name in operations}
    return report


if __name__ == "__main__":
    sys.exit(main())
