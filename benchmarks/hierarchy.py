"""What the host and disk tiers are worth, as ratios within one run.

    python -m benchmarks.hierarchy chat  --model FOLDER        multi-turn chat with and without the host tier
    python -m benchmarks.hierarchy first --model FOLDER        first token: device hit, host hit, disk hit, recomputed
    python -m benchmarks.hierarchy tax   --model FOLDER        no reuse at all, tiers on against off
    python -m benchmarks.hierarchy trace --model FOLDER        real traffic (FOREBAY_TRACE), against an exact simulation
    python -m benchmarks.hierarchy peers --model FOLDER ...    a slice of the chat load on vLLM, llama.cpp and SGLang

--json FILE adds everything measured. Machines vary: only ratios within one run mean anything. A long part can be done
in pieces (--only): what FILE has of the same load already is kept and joined.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib import chat_load as cl
from benchmarks.lib import peer_servers as ps
from benchmarks.lib.client import run_streams
from benchmarks.lib.trace_replay import replay_trace

PAGE = 16


def main() -> None:
    args = parse()
    # The servers are stopped also when this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs = Path(tempfile.mkdtemp(prefix="hierarchy-"))
    earlier = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else {}
    parts = {"chat": chat, "first": first_token, "tax": tax, "trace": trace, "peers": peers}
    report = parts[args.part](args, logs, earlier)
    print(json.dumps(report, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["chat", "first", "tax", "trace", "peers"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--sglang-recipe", type=Path, help="SGLang's peer folder: bin/python, cpu/launch.py, cpu/stubs")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--in-flight", type=int, default=16, help="chat and peers: requests at once; a slice keeps the ratio"
    )
    parser.add_argument("--only", help="chat: device or host; trace: 1 or 16; peers: one server's name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000, help="trace: how many requests")
    parser.add_argument("--port", type=int, default=18650)
    parser.add_argument("--json")
    return parser.parse_args()


def bytes_per_token(model: Path) -> int:
    from forebay.kv.geometry_spec import kv_spec
    from forebay.model.families import read_geometry

    config = json.loads((model / "config.json").read_text())
    return kv_spec(read_geometry(config), PAGE, 2).bytes_per_token


def pool_flags(device_bytes: int, host_bytes: int = 0, disk: Path | None = None, disk_bytes: int = 0) -> list[str]:
    flags = ["--device-cache", f"{device_bytes}B", "--page-size", str(PAGE)]
    if host_bytes:
        flags += ["--host-cache", f"{host_bytes}B"]
    if disk:
        flags += ["--disk-cache", str(disk), "--disk-size", f"{disk_bytes}B"]
    return flags


def flush(server: ps.Server, tier: str) -> None:
    request = urllib.request.Request(f"{server.url}/flush_cache?tier={tier}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


def server_info(server: ps.Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=60) as response:
        info: dict[str, Any] = json.load(response)
    return info


def step_seconds(server: ps.Server) -> dict[str, float]:
    """Our server's own account of its steps, from /metrics: how many of each kind, their seconds and their tokens."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    wanted = ("forebay_step_tokens_total{", "forebay_step_seconds_count{", "forebay_step_seconds_sum{")
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(wanted)}


def chat(args: argparse.Namespace, logs: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """Throughput with the host tier over without; the outputs must be the same tokens."""
    load = cl.ChatLoad(conversations=args.conversations, turns=args.turns, in_flight=args.in_flight)
    unit = bytes_per_token(args.model)
    device = load.working_set_tokens * unit // 4
    host = int(load.working_set_tokens * unit * 1.1)
    variants = {"host": pool_flags(device, host), "device": pool_flags(device)}
    report = {"load": asdict(load), "working_set_tokens": load.working_set_tokens, "device_bytes": device}
    rows: dict[str, Any] = earlier.get("variants", {}) if earlier.get("load") == report["load"] else {}
    for index, (name, flags) in enumerate(variants.items()):
        if args.only in (None, name):
            server = ps.forebay(args.model, args.port + index, *flags)
            server.name = name
            rows[name] = _run_chat(server, load, cl.ask_forebay, logs)
    report |= {"host_bytes": host, "variants": rows}
    if len(rows) == 2:
        report["throughput_ratio"] = rows["host"]["tokens_per_s"] / rows["device"]["tokens_per_s"]
        report["same_tokens"] = rows["host"]["outputs_sha256"] == rows["device"]["outputs_sha256"]
    return report


def _run_chat(server: ps.Server, load: cl.ChatLoad, ask: cl.Ask, logs: Path) -> dict[str, Any]:
    """One server started, the load run, the server stopped."""
    try:
        ps.start(server, logs)
        result = asyncio.run(cl.run_chat(server.url, load, ask))
        steps = step_seconds(server) if ask is cl.ask_forebay else {}
    finally:
        ps.stop(server)
    print(
        f"# {server.name}: {result.seconds:.0f} s, {result.tokens_per_s:,.0f} tok/s, {result.cached_tokens:,} of "
        f"{result.prompt_tokens:,} prompt tokens cached {result.by_tier}",
        file=sys.stderr,
    )
    return {
        "settings": server.settings,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "by_tier": result.by_tier,
        "seconds_by_turn": result.seconds_by_turn,
        "steps": steps,
        "outputs_sha256": hashlib.sha256(json.dumps(result.outputs).encode()).hexdigest(),
    }


def first_token(args: argparse.Namespace, logs: Path, _: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first token of a 4,096-token prompt by where its KV is; medians over rounds."""
    unit = bytes_per_token(args.model)
    disk = Path(tempfile.mkdtemp(prefix="forebay-disk-", dir=os.environ.get("FOREBAY_BENCH_DISK")))
    server = ps.forebay(
        args.model, args.port, *pool_flags(unit * 12288, unit * 32768, disk, unit * 131072), "--load", "always"
    )
    rng = random.Random(3)
    rows: dict[str, list[float]] = {k: [] for k in ("recomputed", "device hit", "host hit", "disk hit")}
    tiers: dict[str, Any] = {}
    try:
        ps.start(server, logs)
        for _ in range(args.rounds):
            prompt = rng.choices(range(100, 48000), k=4097)
            for state in rows:
                if state in ("host hit", "disk hit"):
                    flush(server, "device")
                if state == "disk hit":
                    time.sleep(1.5)
                    flush(server, "host")
                    drop_page_cache(disk)
                _, answers = asyncio.run(run_streams(server.url, "m", [prompt], 1, {}))
                rows[state].append(answers[0].first_s)
                tiers[state] = answers[0].usage.get("prompt_tokens_details")
                time.sleep(0.5)
        rate = sequential_read_rate(disk)
    finally:
        ps.stop(server)
    medians = {k: statistics.median(v) for k, v in rows.items()}
    budget = medians["device hit"] + 2 * 4096 * unit / rate
    return {
        "first_token_s": medians,
        "usage": tiers,
        "host_over_device": medians["host hit"] / medians["device hit"],
        "recomputed_over_host": medians["recomputed"] / medians["host hit"],
        "disk_read_bytes_per_s": rate,
        "disk_hit_budget_s": budget,
        "disk_hit_within_budget": medians["disk hit"] <= budget,
    }


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sequential_read_rate(folder: Path) -> float:
    """Bytes/s of plain sequential reads of the tier's own files, page cache dropped."""
    rates = []
    for _ in range(3):
        drop_page_cache(folder)
        total, start = 0, time.perf_counter()
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1 << 20):
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(4 << 20):
                    total += len(chunk)
        rates.append(total / (time.perf_counter() - start))
    return statistics.median(rates)


def tax(args: argparse.Namespace, logs: Path, _: dict[str, Any]) -> dict[str, Any]:
    """No prompt ever repeats: what do the tiers cost? Interleaved rounds on two servers."""
    unit = bytes_per_token(args.model)
    device = unit * 16384
    off = ps.forebay(args.model, args.port, *pool_flags(device))
    on = ps.forebay(args.model, args.port + 1, *pool_flags(device, unit * 65536))
    off.name, on.name = "off", "on"
    rates: dict[str, list[float]] = {"off": [], "on": []}
    rng = random.Random(5)
    try:
        for server in (off, on):
            ps.start(server, logs)
        for number in range(args.rounds + 1):
            for server in (off, on) if number % 2 else (on, off):
                prompts = [rng.choices(range(100, 48000), k=448) for _ in range(32)]
                wall, _ = asyncio.run(run_streams(server.url, "m", prompts, 64, {}))
                if number:
                    rates[server.name].append(32 * (448 + 64) / wall)
    finally:
        ps.stop(off)
        ps.stop(on)
    ratios = [a / b for a, b in zip(rates["on"], rates["off"], strict=True)]
    return {"tokens_per_s": rates, "ratios": ratios, "median_ratio": statistics.median(ratios)}


def trace(args: argparse.Namespace, logs: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """The trace's first requests: (a) one at a time against the simulation, (b) 16 in flight."""
    path = os.environ.get("FOREBAY_TRACE")
    if not path:
        sys.exit("hierarchy trace: set FOREBAY_TRACE to a trace file (one JSON object a line with hash_ids)")
    unit = bytes_per_token(args.model)
    report = dict(earlier)
    for in_flight in (1, 16):
        if args.only not in (None, str(in_flight)):
            continue
        flags = pool_flags(unit * PAGE * 2048, unit * PAGE * 8192)
        server = ps.forebay(args.model, args.port, *flags, "--load", "always")
        try:
            ps.start(server, logs)
            flush(server, "device")
            flush(server, "host")
            # Whole pages of what was asked for.
            pools = server_info(server)["effective"]["pools"]
            device_pages, host_pages = pools["device_pool_tokens"] // PAGE, pools["host_pool_tokens"] // PAGE
            report[f"{in_flight} in flight"] = asyncio.run(
                replay_trace(server.url, Path(path), args.requests, in_flight, PAGE, device_pages, host_pages)
            )
        finally:
            ps.stop(server)
    return report


def peers(args: argparse.Namespace, logs: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """A slice of the chat load on every peer given, each with the same device pool, one after the other."""
    load = cl.ChatLoad(conversations=args.conversations, turns=args.turns, in_flight=args.in_flight)
    device_tokens = load.working_set_tokens // 4
    if device_tokens < load.context_tokens:
        sys.exit(
            f"hierarchy peers: a pool of {device_tokens} tokens (a quarter of the load) cannot hold one conversation"
        )
    rows = earlier.get("servers", {}) if earlier.get("load") == asdict(load) else {}
    for server, ask in _peer_servers(args, load, device_tokens):
        if args.only in (None, server.name):
            rows[server.name] = _run_chat(server, load, ask, logs)
    return {"load": asdict(load), "device_tokens": device_tokens, "servers": rows}


def _peer_servers(args: argparse.Namespace, load: cl.ChatLoad, device_tokens: int) -> list[tuple[ps.Server, cl.Ask]]:
    unit = bytes_per_token(args.model)
    host_bytes = int(load.working_set_tokens * unit * 1.1)
    entries: list[tuple[ps.Server, cl.Ask]] = [
        (ps.forebay(args.model, args.port, *pool_flags(device_tokens * unit, host_bytes)), cl.ask_forebay)
    ]
    flags: tuple[str, ...]
    if args.llama_server:
        flags = ("--cache-ram", str(host_bytes >> 20))
        # As many slots as hold a whole conversation. Sharing the pool (--kv-unified) was slower, and it answers 500
        # when the running conversations outgrow it.
        slots = min(load.in_flight, device_tokens // load.context_tokens)
        size = device_tokens // slots
        llama = ps.llama_cpp(args.llama_server, args.gguf, args.port + 1, *flags, slots=slots, context=size)
        entries.append((llama, cl.ask_llama_cpp))
    if args.vllm_python:
        # Blocks of 32, the smallest its CPU kernels take well: at its default of 128 a turn computes 96 tokens more
        # again.
        flags = ("--kv-cache-memory-bytes", str(device_tokens * unit), "--block-size", "32")
        flags += ("--max-model-len", str(load.context_tokens), "--enable-prompt-tokens-details")
        server = ps.vllm(args.vllm_python, args.model, args.port + 2, *flags)
        server.env.pop("VLLM_CPU_KVCACHE_SPACE")
        entries.append((server, cl.ask_vllm))
    if args.sglang_recipe:
        ratio = host_bytes / (device_tokens * unit)
        entries.append((ps.sglang(args.sglang_recipe, args.model, args.port + 3, device_tokens, ratio), cl.ask_sglang))
    return entries


if __name__ == "__main__":
    main()
