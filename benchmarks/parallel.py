"""What ranks, INT4 weights and latent attention cost and give, as ratios within one run.

    python -m benchmarks.parallel all            every case below, in turn (about ten minutes on two cores)
    python -m benchmarks.parallel int4           a dense 1B model: INT4 linears against the same weights in bf16
    python -m benchmarks.parallel kimi           a Kimi-shaped one: INT4 routed experts, the rest bf16, against all bf16
    python -m benchmarks.parallel latent         latent attention on 8,192 tokens: absorbed against naive
    python -m benchmarks.parallel ranks          one rank with two threads against two ranks with one, on the 1B model
    python -m benchmarks.parallel loading        memory while loading against the plan's figure

The models are random, in the formats they are published in, and are made once into $FOREBAY_CACHE/benchmarks (8 GB in
all). Servers that are compared are up at the same time and measured in turns, each round in another order; the tables
show medians over rounds and, for ratios, the median of the rounds' ratios. Both forms of a model hold the same numbers,
so their greedy tokens must be equal: that is checked in every run, and a difference ends it.

Exit status: 0 all goals met, 1 one was missed (the table says by how much), 2 bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lib import peer_servers as ps
from benchmarks.lib.client import run_streams
from benchmarks.lib.latent_forms import compare
from benchmarks.lib.load_peak import measure as load_peak
from benchmarks.lib.random_checkpoints import DENSE_1B, KIMI, Shape, checkpoint, weight_bytes
from benchmarks.lib.roofline import read_bandwidth

_VOCAB = 32768
_PROMPT = 32


@dataclass(frozen=True)
class Row:
    """One line of the table. ``goal`` is a limit that ``value`` is held against, ``at_most`` or at least; None:
    reported.
    """

    case: str
    what: str
    value: float
    unit: str = ""
    goal: float | None = None
    at_most: bool = False
    rounds: tuple[float, ...] = ()
    """What ``value`` is the median of."""

    @property
    def is_met(self) -> bool:
        if self.goal is None:
            return True
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def main() -> int:
    args = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are stopped whatever ends this run
    cases = list(_CASES) if args.case == "all" else [args.case]
    rows: list[Row] = []
    for case in cases:
        print(f"# {case}", flush=True)
        rows += _CASES[case](args)
    _print(rows)
    if args.json:
        records = [{**asdict(row), "met": row.is_met} for row in rows]
        args.json.write_text(json.dumps({"schema": 1, "rounds": args.rounds, "rows": records}, indent=1))
    return 0 if all(row.is_met for row in rows) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["all", *_CASES], help="see above")
    parser.add_argument("--rounds", type=int, default=5, help="how often every server is measured (default 5)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded in each measurement (default 64)")
    parser.add_argument("--context", type=int, default=8192, help="tokens that `latent` attends to (default 8192)")
    parser.add_argument("--forms", default="bf16,int4", help="of the 1B model in `ranks` and `loading` (default both)")
    parser.add_argument("--port", type=int, default=18700, help="the first of four ports for servers (default 18700)")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args = parser.parse_args()
    if set(args.forms.split(",")) - {"bf16", "int4"}:
        parser.error(f"--forms {args.forms}: there are bf16 and int4")
    return args


# The cases


def _int4(args: argparse.Namespace) -> list[Row]:
    ratio = _compare_forms(args, DENSE_1B)
    return [
        *_rates("int4", ratio.rates),
        Row("int4", "bytes a decoded token, INT4 / bf16", ratio.byte_ratio, "x", 0.35, at_most=True),
        _median_row("int4", "speed at one stream, INT4 / bf16", ratio.speed, "x", 1.8),
        *_bandwidths("int4", DENSE_1B, ratio.rates),
    ]


def _kimi(args: argparse.Namespace) -> list[Row]:
    ratio = _compare_forms(args, KIMI)
    return [
        *_rates("kimi", ratio.rates),
        Row("kimi", "bytes a decoded token, INT4 experts / bf16", ratio.byte_ratio, "x"),
        _median_row("kimi", "speed at one stream, INT4 experts / bf16", ratio.speed, "x"),
        _median_row("kimi", "that speed of what the bytes allow", [s * ratio.byte_ratio for s in ratio.speed], "x"),
        *_bandwidths("kimi", KIMI, ratio.rates),
    ]


def _latent(args: argparse.Namespace) -> list[Row]:
    from forebay.engine.kernels import load_backend

    found = compare(load_backend(threads=2), args.context, 2 * args.rounds)
    rows = [Row("latent", f"{name}, one layer", found[f"{name}_s"] * 1e3, "ms") for name in ("absorbed", "naive")]
    rows.append(Row("latent", "expanding all latents (the product alone)", found["expanding_s"] * 1e3, "ms"))
    cached = found["naive_cache_bytes"] / found["absorbed_cache_bytes"]
    fastest_s = found["naive_cache_bytes"] / (read_bandwidth() * 1e9)
    return [
        *rows,
        Row("latent", "cache bytes a token, naive / absorbed", cached, "x"),
        Row("latent", "answers apart, relative", found["difference"], "", 0.02, at_most=True),
        Row(
            "latent",
            f"speed at {args.context:,} tokens, absorbed / naive",
            found["naive_s"] / found["absorbed_s"],
            "x",
            3.0,
        ),
        Row("latent", "and were the naive form's cache read at memory speed", fastest_s / found["absorbed_s"], "x"),
    ]


def _ranks(args: argparse.Namespace) -> list[Row]:
    rows = []
    for form in args.forms.split(","):
        folder = checkpoint(DENSE_1B, form)
        servers = [_server("tp 1", folder, args.port), _server("tp 2", folder, args.port + 1, "--tp", "2")]
        rates = _measure(servers, args)
        rows += _rates(f"ranks {form}", rates)
        ratios = _ratio(rates["tp 2"], rates["tp 1"])
        rows.append(_median_row(f"ranks {form}", "speed, 2 ranks x 1 thread / 1 x 2", ratios, "x", 0.9))
    return rows


def _loading(args: argparse.Namespace) -> list[Row]:
    from forebay.machine.local import LocalMachine
    from forebay.planning.make_plan import PlanOptions, make_plan

    rows = []
    folders = [(f"1B {form}", checkpoint(DENSE_1B, form)) for form in args.forms.split(",")]
    for name, folder in [*folders, ("kimi int4", checkpoint(KIMI, "int4"))]:
        for tp in (1, 2):
            plan = make_plan(PlanOptions(str(folder), tp=tp), LocalMachine())
            planned = plan.weights_per_rank_bytes
            assert planned is not None
            found = load_peak(folder, tp - 1, tp)
            case = f"loading {name}, tp {tp}"
            over = (found["peak_bytes"] - found["weights_bytes"]) / found["tensor_bytes"]
            rows += [
                Row(case, "weights, actual / plan", found["weights_bytes"] / planned, "x"),
                Row(case, "peak memory / plan", found["peak_bytes"] / planned, "x", 1.05, at_most=True),
                Row(case, "peak over the weights, in largest tensors", over, "", 1.0, at_most=True),
            ]
    return rows


_CASES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "int4": _int4, "kimi": _kimi, "latent": _latent, "ranks": _ranks, "loading": _loading,
}  # fmt: skip


# Measuring


@dataclass(frozen=True)
class _Forms:
    """Both forms of one model: tokens a second in each round, and INT4's ratios."""

    rates: dict[str, list[float]]
    speed: tuple[float, ...]
    byte_ratio: float


def _compare_forms(args: argparse.Namespace, shape: Shape) -> _Forms:
    servers = [_server(form, checkpoint(shape, form), args.port + i) for i, form in enumerate(("bf16", "int4"))]
    rates = _measure(servers, args, same_tokens=True)
    read = {form: weight_bytes(shape, form)[0] for form in rates}
    return _Forms(rates, _ratio(rates["int4"], rates["bf16"]), read["int4"] / read["bf16"])


def _server(name: str, folder: Path, port: int, *flags: str) -> ps.Server:
    server = ps.forebay(folder, port, "--device-cache", "256MB", *flags, threads=2)
    server.name = name
    return server


def _measure(
    servers: list[ps.Server], args: argparse.Namespace, *, same_tokens: bool = False
) -> dict[str, list[float]]:
    """Decoded tokens a second at one stream: every server once a round."""
    rates: dict[str, list[float]] = {server.name: [] for server in servers}
    with tempfile.TemporaryDirectory(prefix="parallel-") as logs:
        try:
            for server in servers:
                ps.start(server, Path(logs))
                _decode_rate(server, 8)
            if same_tokens:
                _check_tokens(servers)
            for number in range(args.rounds):
                at = number % len(servers)
                for server in servers[at:] + servers[:at]:
                    rates[server.name].append(_decode_rate(server, args.tokens))
        finally:
            for server in servers:
                ps.stop(server)
    return rates


def _decode_rate(server: ps.Server, tokens: int) -> float:
    prompt = [random.randrange(300, _VOCAB) for _ in range(_PROMPT)]
    _, answers = asyncio.run(run_streams(server.url, server.model, [prompt], tokens, server.extra))
    return (tokens - 1) / (answers[0].total_s - answers[0].first_s)


def _check_tokens(servers: Sequence[ps.Server]) -> None:
    """Greedy tokens of one prompt are the same on all.

    Raises:
        RuntimeError: they are not.
    """
    prompt = [random.Random(1).randrange(300, _VOCAB) for _ in range(_PROMPT)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    found = []
    for server in servers:
        data = json.dumps({**body, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            found.append(json.load(answer)["choices"][0]["token_ids"])
    if any(tokens != found[0] for tokens in found):
        raise RuntimeError(f"{' and '.join(s.name for s in servers)} gave different tokens: {found}")
    print(f"# {' and '.join(s.name for s in servers)} give the same tokens", flush=True)


def _ratio(ours: list[float], theirs: list[float]) -> tuple[float, ...]:
    """Round by round."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


def _median_row(case: str, what: str, rounds: Sequence[float], unit: str, goal: float | None = None) -> Row:
    return Row(case, what, statistics.median(rounds), unit, goal, rounds=tuple(rounds))


def _rates(case: str, rates: dict[str, list[float]]) -> list[Row]:
    return [_median_row(case, f"{name}, one stream", values, "tok/s") for name, values in rates.items()]


def _bandwidths(case: str, shape: Shape, rates: dict[str, list[float]]) -> list[Row]:
    return [
        Row(case, f"weights read by {form}", statistics.median(values) * weight_bytes(shape, form)[0] / 1e9, "GB/s")
        for form, values in rates.items()
    ]


def _print(rows: list[Row]) -> None:
    print("\n| case | | value | rounds | goal | |\n|---|---|---|---|---|---|")
    for row in rows:
        sign = "≤" if row.at_most else "≥"
        goal = "" if row.goal is None else f"{sign} {row.goal:g}"
        verdict = "" if row.goal is None else "met" if row.is_met else f"missed by {abs(row.value / row.goal - 1):.0%}"
        spread = f"{min(row.rounds):,.3g} to {max(row.rounds):,.3g}" if row.rounds else ""
        print(f"| {row.case} | {row.what} | {row.value:,.3g} {row.unit} | {spread} | {goal} | {verdict} |")
    print(f"# load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    sys.exit(main())
