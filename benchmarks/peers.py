"""Forebay against llama.cpp, vLLM and transformers, on one machine in one run.

    python -m benchmarks.peers --model FOLDER --gguf BF16.gguf --llama-server BIN --vllm-python PYTHON [--json OUT]

All servers are up at once (idle ones use no CPU); rounds are interleaved: each round measures every server once at
every load, in a rotating order, once all the others have come to rest (thread pools spin on for a while after a
request, and would take the cores from the next server's). Prompts are random token ids, new in every request, so that
no prefix cache helps anyone. The table shows medians over rounds, and ratios of Forebay to the others within the same
round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import peer_servers as ps
from benchmarks.lib.client import run_streams
from benchmarks.lib.modules import module_command, module_env

STREAMS = (1, 4, 16, 32)
PREFILLS = (512, 2048)
PREFILL_TRIES = 3


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are stopped whatever ends this run
    cases = [f"{n} streams" for n in STREAMS] + [f"prefill {n}" for n in PREFILLS]
    logs = Path(tempfile.mkdtemp(prefix="peers-"))
    servers = build_servers(args)
    results: dict[str, dict[str, list[float]]] = {s.name: {c: [] for c in cases} for s in servers}
    ceilings: dict[str, list[float]] = {}
    try:
        for server in servers:
            ps.start(server, logs)
            print(f"# {server.name}: first token after {server.first_token_s:.1f} s ({server.settings})", flush=True)
        for server in servers:
            warm_up(server)
        idle = {s.name: idle_cpu(s) for s in servers}
        for round_number in range(args.rounds):
            order = servers[round_number % len(servers) :] + servers[: round_number % len(servers)]
            for case in cases:
                for server in order:
                    come_to_rest(servers)
                    results[server.name][case].append(measure(server, case))
            for ceiling, value in ceilings_now(args.model).items():
                ceilings.setdefault(ceiling, []).append(value)
            print(f"# round {round_number + 1} of {args.rounds} done", flush=True)
        memory = {s.name: ps.tree_rss_bytes(s) for s in servers}
        warm_start = restart_time(servers[0], logs)
    finally:
        for server in servers:
            ps.stop(server)
    if not args.no_transformers:
        results["transformers"] = transformers_rows(args)
    report = {
        "schema": 1,
        "cpu": cpu_name(),
        "rounds": args.rounds,
        "settings": {s.name: s.settings for s in servers},
        "tokens_per_s": results,
        "ceilings": ceilings,
        "first_token_s": {s.name: s.first_token_s for s in servers} | {"forebay, again": warm_start},
        "resident_bytes": memory,
        "idle_cores": idle,
    }
    print_table(report, cases)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the bf16 Hugging Face folder")
    parser.add_argument("--gguf", type=Path, help="the same weights as bf16 GGUF (lib/gguf_bf16.py makes it)")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server binary")
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's own environment")
    parser.add_argument("--vllm-eager", action="store_true", help="start vLLM without compiling (not its best setting)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=18600)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", help="write everything measured to this file")
    return parser.parse_args()


def build_servers(args: argparse.Namespace) -> list[ps.Server]:
    servers = [ps.forebay(args.model, args.port)]
    if args.llama_server:
        servers.append(ps.llama_cpp(args.llama_server, args.gguf, args.port + 1))
    if args.vllm_python:
        servers.append(ps.vllm(args.vllm_python, args.model, args.port + 2, eager=args.vllm_eager))
    return servers


def random_prompt(length: int) -> list[int]:
    return [random.randrange(100, 48000) for _ in range(length)]


def warm_up(server: ps.Server) -> None:
    for case in ("4 streams", "32 streams", "prefill 2048", "prefill 512"):
        measure(server, case, tokens=8)


def measure(server: ps.Server, case: str, tokens: int = 128) -> float:
    """Tokens per second: generated ones for streams, prompt tokens for prefill."""
    kind, count = (case.split()[1], case.split()[0]) if case.endswith("streams") else case.split()
    if kind == "streams":
        prompts = [random_prompt(16) for _ in range(int(count))]
        wall, _ = asyncio.run(run_streams(server.url, server.model, prompts, tokens, server.extra))
        return len(prompts) * tokens / wall
    tries = []
    for _ in range(PREFILL_TRIES):
        _, answers = asyncio.run(run_streams(server.url, server.model, [random_prompt(int(count))], 1, server.extra))
        tries.append(int(count) / answers[0].total_s)
    return statistics.median(tries)


def come_to_rest(servers: list[ps.Server], timeout_s: float = 5.0) -> None:
    """Wait until no server used more than a twentieth of a core for 0.4 s."""
    deadline = time.perf_counter() + timeout_s
    while time.perf_counter() < deadline:
        before = sum(ps.cpu_seconds(s) for s in servers)
        time.sleep(0.4)
        if sum(ps.cpu_seconds(s) for s in servers) - before <= 0.02:
            return


def idle_cpu(server: ps.Server, seconds: float = 5.0) -> float:
    time.sleep(1.0)
    before = ps.cpu_seconds(server)
    time.sleep(seconds)
    return (ps.cpu_seconds(server) - before) / seconds


def restart_time(server: ps.Server, logs: Path) -> float:
    """Start-up to first token with a warm page cache and the library built."""
    ps.stop(server)
    ps.start(server, logs)
    return server.first_token_s


def ceilings_now(model: Path) -> dict[str, float]:
    """The roofline beside this round's figures, in a process of its own (its thread pool ends with it)."""
    found: dict[str, float] = run_lib("roofline", str(model), *map(str, PREFILLS))
    return found


def transformers_rows(args: argparse.Namespace) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = run_lib("transformers_peer", str(args.model), json.dumps([STREAMS, PREFILLS]))
    return rows


def run_lib(module: str, *arguments: str) -> Any:
    """What a program of ``lib`` prints last, as JSON."""
    command = module_command(f"lib.{module}", *arguments)
    env = {**module_env(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def print_table(report: dict[str, Any], cases: list[str]) -> None:
    results = report["tokens_per_s"]
    names = list(results)
    compared = [*names[1:], "ceiling"]
    print("\n| " + " | ".join(["tok/s, median", *names, "ceiling", *(f"forebay / {n}" for n in compared)]) + " |")
    print("|---" * (2 * len(names) + 2) + "|")
    for case in cases:
        medians = {n: statistics.median(results[n][case]) for n in names if results[n].get(case)}
        ceiling = report["ceilings"].get(case)
        others = [*(results[n].get(case) for n in names[1:]), ceiling]
        ratios = [f"{ratio(results['forebay'][case], other):.2f}" if other else "" for other in others]
        cells = [f"{medians[n]:,.0f}" if n in medians else "-" for n in names]
        print(
            "| " + " | ".join([case, *cells, f"{statistics.median(ceiling):,.0f}" if ceiling else "", *ratios]) + " |"
        )
    for key in ("first_token_s", "resident_bytes", "idle_cores"):
        print(f"{key}: " + ", ".join(f"{n} {v:,.3g}" for n, v in report[key].items()))


def ratio(ours: list[float], theirs: list[float]) -> float:
    if len(theirs) == len(ours):
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours) / statistics.median(theirs)


if __name__ == "__main__":
    main()
