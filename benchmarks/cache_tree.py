"""The page tree at 1,000,000 pages against 10,000: match, insert and evict a 4k-token prefix.

    python -m benchmarks.cache_tree [--json out.json] [--sglang-python .../peers/sglang/bin/python]

Before each timed operation other memory is walked through, as a forward pass does between two requests, so that neither
tree is measured out of the processor's caches. Each tree lives in a process of its own, and they take turns round by
round; a ratio is the median of the ratios within a round. The same key sets go to SGLang's radix cache (its Python and
its Rust tree core) in its own environment when its interpreter is given: operations are what a request does there,
match_prefix with lock and unlock, insert, evict of as many tokens.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.modules import module_command, module_env

PAGE = 16
TOKENS = 4096
PREFIX = TOKENS // PAGE
OPERATIONS = ("match_us", "insert_us", "evict_us")
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


class Ours:
    """Forebay's cache over ``sequences``; ``round`` times one of each operation, cold caches before each."""

    def __init__(self, sequences: np.ndarray) -> None:
        from forebay.engine.cache.config import TierConfig
        from forebay.engine.cache.prefix_cache import PrefixCache
        from forebay.kv.spec import KVSpec, LayerGroup, Part

        spec = KVSpec((LayerGroup("full", (0,), (Part("k", 1, 1, 2),)),), PAGE)
        before = resident_bytes()
        self._sequences = sequences
        self._rng = np.random.default_rng(1)
        self._cache = cache = PrefixCache(spec, TierConfig(device_pages=(len(sequences) * PREFIX,)))
        for sequence in sequences:
            lease = cache.open(sequence)
            assert lease is not None
            assert cache.extend(lease, TOKENS)
            cache.commit(lease, sequence)
            cache.close(lease)
        pages = cache.tree.num_nodes
        self.facts = {"pages": pages, "bytes_a_page": (resident_bytes() - before) / pages}
        # The pages that sharing has saved: taken, so that an insertion has to evict.
        fill = cache.open(np.full(1, -1, dtype=np.int32))
        assert fill is not None
        assert cache.extend(fill, (len(sequences) * PREFIX - pages) * PAGE)

    def round(self) -> dict[str, float]:
        """Microseconds of each operation."""
        sequences, rng, cache = self._sequences, self._rng, self._cache
        known = np.append(sequences[rng.integers(len(sequences) // 2, len(sequences))], np.int32(0))
        new = rng.integers(0, 32_000, TOKENS, dtype=np.int32)
        took: dict[str, float] = {}
        with timed(took, "match_us"):
            lease = cache.open(known)
            assert lease is not None
            cache.close(lease)
        lease = cache.open(new)
        assert lease is not None
        with timed(took, "evict_us"):
            assert cache.extend(lease, TOKENS)
        with timed(took, "insert_us"):
            cache.commit(lease, new)
        cache.close(lease)
        return took

    def end(self) -> None:
        """The cache must still be whole."""
        self._cache.check()


class timed:
    """Note the microseconds of a block, cold caches before it."""

    def __init__(self, took: dict[str, float], name: str) -> None:
        self._took, self._name = took, name

    def __enter__(self) -> None:
        cold()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._took[self._name] = (time.perf_counter() - self._started) * 1e6


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sglang_cache(core: str) -> Any:
    """SGLang's radix cache over nothing but its tree; importable in its own environment only."""
    # What makes the CPU recipe's environment importable (scripts/peers/sglang/launch.py) does so here as well.
    spec = importlib.util.spec_from_file_location("recipe", RECIPE / "launch.py")
    assert spec is not None, "the recipe is not where it was"
    assert spec.loader is not None, "the recipe cannot be loaded"
    sys.modules["recipe"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["recipe"])
    sys.path.insert(0, str(RECIPE / "stubs"))
    import torch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
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
    return UnifiedRadixCache(params)


class Theirs:
    """SGLang's radix cache over the same ``sequences``; runs in its own environment."""

    def __init__(self, core: str, sequences: np.ndarray) -> None:
        self._cache = sglang_cache(core)
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as api

        self._api, self._torch = api, torch
        self._sequences = sequences
        self._rng = np.random.default_rng(1)
        before = resident_bytes()
        for i, sequence in enumerate(sequences):
            value = torch.arange(i * TOKENS, (i + 1) * TOKENS, dtype=torch.int64)
            self._cache.insert(api.InsertParams(key=self._key(sequence), value=value))
        pages = len(sequences) * PREFIX * 5 // 8
        core_name = type(self._cache.tree_core).__name__
        self.facts = {"pages": pages, "bytes_a_page": (resident_bytes() - before) / pages, "core": core_name}

    @staticmethod
    def _key(tokens: np.ndarray) -> Any:
        from array import array

        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens.tolist()), None)

    def round(self) -> dict[str, float]:
        """Microseconds of each operation."""
        rng, cache, api, sequences = self._rng, self._cache, self._api, self._sequences
        known = self._key(sequences[rng.integers(len(sequences) // 2, len(sequences))])
        new = self._key(rng.integers(0, 32_000, TOKENS, dtype=np.int32))
        value = self._torch.arange(TOKENS, dtype=self._torch.int64)
        took: dict[str, float] = {}
        with timed(took, "match_us"):
            match = cache.match_prefix(api.MatchPrefixParams(key=known))
            cache.unlock(cache.lock(match.last_device_node))
        with timed(took, "evict_us"):
            cache.evict(api.EvictParams(num_tokens=TOKENS))
        with timed(took, "insert_us"):
            cache.insert(api.InsertParams(key=new, value=value))
        self._found = match.device_prefix_len
        return took

    def end(self) -> None:
        """The last match must have found its keys."""
        assert self._found >= TOKENS // 2, "the keys were not found"


def work(kind: str, pages: int) -> None:
    """A worker: builds its tree, then a round for each line that comes; JSON lines out."""
    # Collections of a tree of millions of objects are the server's business (it freezes them), not an operation's.
    gc.disable()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever a library prints goes to the errors.
    os.dup2(2, 1)
    tree = Ours(keys(pages)) if kind == "ours" else Theirs(kind, keys(pages))
    print(json.dumps(tree.facts), file=out)
    for _ in sys.stdin:
        print(json.dumps(tree.round()), file=out)
    tree.end()


class Worker:
    """A tree in a process of its own."""

    def __init__(self, python: str, kind: str, pages: int) -> None:
        self.name = kind
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the worker
        self._process = subprocess.Popen(
            module_command("cache_tree", "--only", kind, "--pages", str(pages), python=python),
            env=module_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )
        self.facts = self._answer()
        self.rounds: list[dict[str, float]] = []

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self.name}: {(self._errors.read().strip().splitlines() or ['no message'])[-1]}")
        return dict(json.loads(line))

    def round(self) -> None:
        assert self._process.stdin is not None
        print("round", file=self._process.stdin)
        self.rounds.append(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait():
            raise RuntimeError(f"{self.name}: its tree is not whole")

    def medians(self) -> dict[str, Any]:
        return {**{name: statistics.median(r[name] for r in self.rounds) for name in OPERATIONS}, **self.facts}


def ratios(ours: Worker, other: Worker) -> dict[str, float]:
    """Medians of the ratios within a round."""
    pairs = list(zip(ours.rounds, other.rounds, strict=True))
    return {name: statistics.median(a[name] / b[name] for a, b in pairs) for name in OPERATIONS}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Small against large, and against SGLang where there is one; the trees take turns round by round."""
    workers = [Worker(sys.executable, "ours", args.small), Worker(sys.executable, "ours", args.pages)]
    report: dict[str, Any] = {}
    for core in ("python", "rust") if args.sglang_python else ():
        try:
            workers.append(Worker(args.sglang_python, core, args.pages))
        except RuntimeError as error:
            report[f"sglang_{core}"] = {"error": str(error)}
    for number in range(args.rounds):
        for worker in workers[number % len(workers) :] + workers[: number % len(workers)]:
            worker.round()
    for worker in workers:
        worker.close()
    small, large, *theirs = workers
    report |= {"small": small.medians(), "large": large.medians(), "large_over_small": ratios(large, small)}
    for worker in theirs:
        report[f"sglang_{worker.name}"] = worker.medians()
        report[f"ours_over_sglang_{worker.name}"] = ratios(large, worker)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000, help="of the large tree")
    parser.add_argument("--small", type=int, default=10_000, help="pages of the small tree")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sglang-python", help="interpreter of an environment with sglang (scripts/peers)")
    parser.add_argument("--only", choices=["ours", "python", "rust"], help=argparse.SUPPRESS)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.only:
        work(args.only, args.pages)
        return
    report = compare(args)
    print(json.dumps(report, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
