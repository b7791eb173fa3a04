"""Compare A with B: loads of the same shape on both sides, in interleaved rounds, so that drift affects both alike.

Two servers that are up: rounds alternate (A B, B A, ...). Two plan files: each server is started, measured and ended in
the order A B B A, and the time of a start is reported apart.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import DeadError, UsageError
from forebay.workload.bench.result import Result
from forebay.workload.bench.run import Bench, salt_of
from forebay.workload.bench.settings import BenchSettings
from forebay.workload.bench.stats import Ratio, ratio_of_rounds
from forebay.workload.generate.restart import up_command
from forebay.workload.target import resolve, up_address

__all__ = ["Comparison", "compare"]

MEASURES: dict[str, tuple[str, Callable[[Result], float], bool]] = {
    "output": ("output tokens per second", lambda r: r.output_per_s.value, True),
    "first_token": ("time to first token, p50", lambda r: r.first_token_s[50].value, False),
    "between_tokens": ("time between tokens, p50", lambda r: _gap(r), False),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rounds of both sides; ``ratios`` are B over A. ``start_s`` has one entry per start, for sides that were
    started.
    """

    a: str
    b: str
    rounds_a: list[Result]
    rounds_b: list[Result]
    ratios: dict[str, Ratio | None]
    start_s: dict[str, list[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The record with a schema number."""
        return {
            "schema": 1,
            "a": self.a,
            "b": self.b,
            "ratios_b_over_a": {
                name: None if ratio is None else {**asdict(ratio), "differs": ratio.differs}
                for name, ratio in self.ratios.items()
            },
            "start_s": self.start_s,
            "rounds_a": [result.as_json() for result in self.rounds_a],
            "rounds_b": [result.as_json() for result in self.rounds_b],
        }

    def table(self) -> str:
        """Text for a terminal: one line per measure."""
        lines = [f"A = {self.a}", f"B = {self.b}", f"{len(self.rounds_a)} rounds per side, interleaved; 99 % intervals"]
        for name, (title, value, more_is_better) in MEASURES.items():
            sides = [sorted(value(r) for r in rounds)[len(rounds) // 2] for rounds in (self.rounds_a, self.rounds_b)]
            lines.append(
                f"  {title:<26} A {_shown(name, sides[0])}  B {_shown(name, sides[1])}  "
                + verdict(self.ratios[name], more_is_better)
            )
        for side, seconds in self.start_s.items():
            lines.append(f"  start of {side}: " + ", ".join(f"{value:.1f} s" for value in seconds))
        notes = sorted({note for result in (*self.rounds_a, *self.rounds_b) for note in result.notes})
        return "\n".join([*lines, *(f"  note: {note}" for note in notes)])


def verdict(ratio: Ratio | None, more_is_better: bool) -> str:
    """A ratio as text: ``no difference`` unless its interval excludes 1."""
    if ratio is None:
        return "too few rounds to say"
    numbers = f"B/A {ratio.value:.3f} [{ratio.low:.3f} – {ratio.high:.3f}]"
    if not ratio.differs:
        return f"no difference: {numbers}"
    better = (ratio.value > 1) == more_is_better
    return f"B is {abs(ratio.value - 1):.1%} {'better' if better else 'worse'}: {numbers}"


async def compare(
    a: str,
    b: str,
    settings: BenchSettings,
    *,
    rounds: int,
    on_status: Callable[[str], None] = lambda _text: None,
) -> Comparison:
    """Measure both sides.

    Args:
        a, b: addresses or run names, or two plan files.
        rounds: rounds per side.

    Raises:
        UsageError: too few rounds, or a plan file against something else.
        DeadError: a side does not answer, or its plan did not start.
    """
    if rounds < 2:
        raise UsageError(f"--rounds is {rounds}; an interval needs at least 2", fix="--rounds 8")
    plans = [_is_plan(side) for side in (a, b)]
    if plans[0] != plans[1]:
        raise UsageError(
            "a plan file can only be compared with a plan file",
            fix="start it with `forebay up` and give its run's name",
        )
    if plans[0]:
        return await _compare_plans(a, b, settings, rounds, on_status)
    return await _compare_servers((a, b), (resolve(a), resolve(b)), settings, rounds, on_status)


async def _compare_servers(
    names: tuple[str, str],
    urls: tuple[str, str],
    settings: BenchSettings,
    rounds: int,
    on_status: Callable[[str], None],
) -> Comparison:
    benches = [await Bench.connect(side, url, settings) for side, url in zip(names, urls, strict=True)]
    results: tuple[list[Result], list[Result]] = ([], [])
    try:
        for bench in benches:  # the first load of a process is slower: connections, code caches, clocks
            on_status(f"warming up: {bench.target}")
            await bench.run(salt_of(settings, f"warm-up {bench.target}"))
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                on_status(f"round {number + 1} of {rounds}: {'AB'[side]}")
                results[side].append(await benches[side].run(_salt(settings, number, side)))
    finally:
        for bench in benches:
            await bench.close()
    return _comparison(*names, results, {})


async def _compare_plans(
    a: str, b: str, settings: BenchSettings, rounds: int, on_status: Callable[[str], None]
) -> Comparison:
    results: tuple[list[Result], list[Result]] = ([], [])
    start_s: dict[str, list[float]] = {"A": [], "B": []}
    halves = (rounds - rounds // 2, rounds // 2)
    for side, half in ((0, 0), (1, 0), (1, 1), (0, 1)):
        plan = (a, b)[side]
        name = f"bench-{'ab'[side]}"
        on_status(f"starting {plan}")
        began = time.monotonic()
        async with _running_server(plan, name):
            start_s["AB"[side]].append(time.monotonic() - began)
            bench = await Bench.connect(plan, up_address(plan), settings)
            try:
                await bench.run(salt_of(settings, f"warm-up {plan}"))
                done = len(results[side])
                for number in range(done, done + halves[half]):
                    on_status(f"round {number + 1} of {rounds}: {'AB'[side]}")
                    results[side].append(await bench.run(_salt(settings, number, side)))
            finally:
                await bench.close()
    return _comparison(a, b, results, start_s)


@asynccontextmanager
async def _running_server(plan: str, name: str) -> AsyncIterator[None]:
    """A server started from a plan, and ended on every way out."""
    code, said = await _forebay(up_command(plan, "--name", name))
    if code != 0:
        raise DeadError(f"`forebay up {plan}` ended with exit code {code}: {said}", fix=f"forebay doctor {name}")
    try:
        yield
    finally:
        await _forebay([sys.executable, "-m", "forebay.cli", "down", name])


async def _forebay(command: list[str]) -> tuple[int, str]:
    """The exit code and the last line on stderr."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return process.returncode or 0, lines[-1] if lines else ""


def _comparison(
    a: str, b: str, results: tuple[list[Result], list[Result]], start_s: dict[str, list[float]]
) -> Comparison:
    ratios = {
        name: ratio_of_rounds([value(r) for r in results[0]], [value(r) for r in results[1]])
        for name, (_, value, _) in MEASURES.items()
    }
    return Comparison(a, b, results[0], results[1], ratios, start_s)


def _salt(settings: BenchSettings, number: int, side: int) -> str:
    """Each side and round has its own prompts of the same shape: two names of one server must not warm each other's
    cache.
    """
    return salt_of(settings, f"round {number} {'AB'[side]}")


def _is_plan(side: str) -> bool:
    return side.endswith(".json") and Path(side).is_file()


def _gap(result: Result) -> float:
    return result.between_tokens_s[50].value if result.between_tokens_s else 0.0


def _shown(name: str, value: float) -> str:
    return f"{value:,.1f} tok/s" if name == "output" else f"{1000 * value:,.2f} ms"
