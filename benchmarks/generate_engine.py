"""``forebay generate`` against the embedded server: does it find the best concurrency,
and what is the host tier worth to it?

    python -m benchmarks.generate_engine concurrency --model FOLDER
        throughput of its own limit over the best fixed one of a sweep
    python -m benchmarks.generate_engine tiers --model FOLDER
        multi-turn rows on a small device pool, with and without the host tier

``concurrency``: the server's own counter of output tokens decides, over a window after the start of each run; its own
limit is given ``--find-s`` (60) seconds to be found, then measured over the same length of window. ``tiers``: the same
rows, a fresh server each; the outputs must be equal, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.lib import peer_servers as ps
from benchmarks.null_server import WORDS


def _text(chosen: random.Random, words: int) -> str:
    return " ".join(chosen.choices(WORDS, k=words))


def _write_rows(path: Path, rows: int, turns: int, words: int, seed: int) -> None:
    chosen = random.Random(seed)
    with path.open("w") as out:
        for number in range(rows):
            messages: list[dict[str, str]] = []
            for turn in range(turns):
                asked = f"{number} {turn} {_text(chosen, words)}. What comes next?"
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": "-"}]
            out.write(json.dumps({"id": f"r{number}", "messages": messages}) + "\n")


def _output_tokens(url: str) -> float:
    """Tokens the server has generated so far."""
    from forebay.servers.registry import server_named

    with urlopen(f"{url}/metrics") as answer:
        counted = server_named("embedded").counters(answer.read().decode()).generated
    assert counted is not None, "the embedded server counts its tokens"
    return float(counted)


def _command(rows: Path, out: Path, url: str, *more: str) -> list[str]:
    head = [sys.executable, "-m", "forebay.cli", "generate", str(rows), "-o", str(out), "-s", url, "--json"]
    keep = [f for filter_ in ("empty", "repeating", "unclosed-reasoning") for f in (f"--on-{filter_}", "keep")]
    return [*head, *keep, *more]


def _rate(url: str, rows: Path, out: Path, settle_s: float, window_s: float, *more: str) -> dict[str, Any]:
    """Output tokens a second between ``settle_s`` and ``settle_s + window_s`` of one run, which is then stopped."""
    log = out.with_suffix(".events")
    with log.open("wb") as handle:
        client = subprocess.Popen(_command(rows, out, url, *more), stdout=handle, stderr=subprocess.DEVNULL)
    try:
        while b'"server_up"' not in log.read_bytes():
            time.sleep(0.05)
            assert client.poll() is None, log.read_text()
        time.sleep(settle_s)
        began, before = time.monotonic(), _output_tokens(url)
        time.sleep(window_s)
        rate = (_output_tokens(url) - before) / (time.monotonic() - began)
        assert client.poll() is None, "the rows ran out before the window did"
    finally:
        client.send_signal(signal.SIGINT)
        time.sleep(0.2)
        client.send_signal(signal.SIGINT)
        client.wait()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    limits = [sum(event["limits"].values()) for event in events if event["event"] == "progress"]
    return {"tokens_per_s": round(rate, 1), "limits": [n for i, n in enumerate(limits) if i == 0 or n != limits[i - 1]]}


def concurrency(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A sweep of fixed limits, our own limit, and the best fixed one again."""
    server = ps.forebay(options.model, options.port, "--device-cache", "1GiB")
    rows = folder / "rows.jsonl"
    results: dict[str, list[dict[str, Any]]] = {}
    number = 0

    def measured(name: str, settle_s: float, *more: str) -> None:
        nonlocal number
        number += 1
        _write_rows(rows, 20_000, 1, 24, number)  # new prompts: nothing is in the cache
        out = folder / f"out{number}.jsonl"
        results.setdefault(name, []).append(
            _rate(server.url, rows, out, settle_s, options.window_s, "--max-tokens", str(options.tokens), *more)
        )
        print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)

    ps.start(server, folder)
    try:
        for fixed in options.sweep:
            measured(f"fixed {fixed}", options.settle_s, "--concurrency", str(fixed))
        best = max(results, key=lambda name: results[name][0]["tokens_per_s"])
        measured("found", options.find_s)
        measured(best, options.settle_s, "--concurrency", best.split()[1])
    finally:
        ps.stop(server)
    best_rate = statistics.mean(run["tokens_per_s"] for run in results[best])
    return {"best": best, "found_over_best": results["found"][0]["tokens_per_s"] / best_rate, "runs": results}


def tiers(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of one whole run each, interleaved, and whether all outputs are the same."""
    rows = folder / "rows.jsonl"
    _write_rows(rows, options.rows, options.turns, options.words, 1)
    flags = ["--device-cache", options.device_cache, "--max-running", str(options.max_running)]
    sides = {"without": [], "with": ["--host-cache", options.host_cache]}
    seconds: dict[str, list[float]] = {}
    outputs: set[bytes] = set()
    for number in range(options.rounds):
        for side, more in sides.items():
            server = ps.forebay(options.model, options.port, *flags, *more)
            out = folder / f"{side}{number}.jsonl"
            ps.start(server, folder)
            try:
                limits = ["--concurrency", str(options.rows), "--max-tokens", str(options.tokens)]
                began = time.monotonic()
                subprocess.run(_command(rows, out, server.url, *limits), check=True, stdout=subprocess.DEVNULL)
                seconds.setdefault(side, []).append(round(time.monotonic() - began, 2))
            finally:
                ps.stop(server)
            outputs.add(out.read_bytes())
            print(f"{side}: {seconds[side][-1]} s", file=sys.stderr, flush=True)
    ratio = statistics.median(seconds["without"]) / statistics.median(seconds["with"])
    turns = options.rows * options.turns
    return {"seconds": seconds, "turns": turns, "ratio": ratio, "same_tokens": len(outputs) == 1}


def main() -> None:
    """Run one part and print its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["concurrency", "tiers"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--tokens", type=int, default=None, help="longest answer")
    parser.add_argument("--sweep", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--find-s", type=float, default=60.0)
    parser.add_argument("--settle-s", type=float, default=8.0)
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--words", type=int, default=180)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device-cache", default="256MB")
    parser.add_argument("--host-cache", default="3GB")
    parser.add_argument("--max-running", type=int, default=6)
    options = parser.parse_args()
    options.tokens = options.tokens or {"concurrency": 64, "tiers": 16}[options.part]
    with tempfile.TemporaryDirectory() as name:
        part = {"concurrency": concurrency, "tiers": tiers}[options.part]
        record = part(options, Path(name))
    settings = {name: str(value) for name, value in vars(options).items()}
    print(json.dumps({"schema": 1, "settings": settings, **record}, indent=1))


if __name__ == "__main__":
    main()
