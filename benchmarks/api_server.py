"""What the API server costs: requests per second, first token, and the CPU of its own process per request and per
token.

    python benchmarks/api_server.py
    python benchmarks/api_server.py --side before=/path/to/old/.venv/bin/python --side after=.venv/bin/python --rounds 7

The model is random and tiny (two layers of 64, SmolLM2's tokenizer), so that the API server and not the model is
what is measured. All sides are up at the same time and take turns, each round in another order; figures are medians
over the rounds, ratios the medians of the rounds' ratios to the first side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from lib import peer_servers as ps
from lib.random_checkpoints import Shape, checkpoint

from forebay.engine.model_import.resolve import resolve_model

PORT = 18300
LINES = {
    "short requests/s": "one token each, 32 at once",
    "short CPU us/request": "of the API server's process",
    "chat requests/s": "1,000 characters, 8 tokens, 32 at once",
    "chat CPU us/request": "",
    "stream tokens/s": "32 streams of 128 tokens",
    "stream CPU us/token": "",
    "first token ms": "one request after the other, median",
    "idle cores": "over 3 s",
}


TINY = Shape(
    "tiny-smollm2",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)


def tiny_model() -> Path:
    """A two-layer model with SmolLM2's tokenizer and chat template."""
    folder, source = checkpoint(TINY, "bf16"), resolve_model("smollm2")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    return folder


async def crowd(count: int, at_once: int, ask: Callable[[int], Awaitable[None]]) -> None:
    """``count`` requests, ``at_once`` of them at any time."""
    numbers = iter(range(count))

    async def one_after_the_other() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))


class Side:
    """One server under test."""

    def __init__(self, name: str, python: str, port: int, model: Path) -> None:
        self.name = name
        argv = [python, "-m", "forebay.engine", str(model), "--port", str(port), "--served-model-name", "m"]
        self.server = ps.Server(name, [*argv, "--device-cache", "64MB", "--threads", "1"], port, "m")

    def cpu_s(self) -> float:
        """CPU seconds of the API server's process so far."""
        assert self.server.process is not None
        return time.clock_gettime((~self.server.process.pid << 3) | 2)

    async def measure(self, seed: int) -> dict[str, float]:
        """One round of everything."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.server.url, connector=connector) as session:
            figures = {}
            rng = random.Random(seed)
            for name, count, path, body in (
                ("short", 600, "/v1/completions", lambda: {"prompt": ids(rng, 32), "max_tokens": 1}),
                ("chat", 300, "/v1/chat/completions", lambda: {"messages": message(rng, 1000), "max_tokens": 8}),
            ):
                bodies = [{"model": "m", "temperature": 0, "ignore_eos": True, **body()} for _ in range(count)]
                seconds, cpu_s = await self._timed(session, path, bodies)
                figures[f"{name} requests/s"] = count / seconds
                figures[f"{name} CPU us/request"] = cpu_s / count * 1e6
            streams = [
                {"model": "m", "prompt": ids(rng, 32), "max_tokens": 128, "ignore_eos": True, "stream": True}
                for _ in range(32)
            ]
            seconds, cpu_s = await self._timed(session, "/v1/completions", streams)
            figures["stream tokens/s"] = 32 * 128 / seconds
            figures["stream CPU us/token"] = cpu_s / (32 * 128) * 1e6
            figures["first token ms"] = await self._first(session, rng)
        began = self.cpu_s()
        await asyncio.sleep(3)
        figures["idle cores"] = (self.cpu_s() - began) / 3
        return figures

    async def _timed(
        self, session: aiohttp.ClientSession, path: str, bodies: list[dict[str, Any]]
    ) -> tuple[float, float]:
        async def ask(number: int) -> None:
            async with session.post(path, json=bodies[number]) as answer:
                text = await answer.text()
                if answer.status != 200 or (bodies[number].get("stream") and not text.endswith("data: [DONE]\n\n")):
                    raise RuntimeError(f"{self.name}: HTTP {answer.status}: {text[-300:]}")

        began, cpu_s = time.perf_counter(), self.cpu_s()
        await crowd(len(bodies), 32, ask)
        return time.perf_counter() - began, self.cpu_s() - cpu_s

    async def _first(self, session: aiohttp.ClientSession, rng: random.Random) -> float:
        times = []
        for _ in range(40):
            body = {"model": "m", "prompt": ids(rng, 32), "max_tokens": 4, "ignore_eos": True, "stream": True}
            began = time.perf_counter()
            async with session.post("/v1/completions", json=body) as answer:
                await answer.content.readline()
                times.append(time.perf_counter() - began)
                await answer.read()
        return statistics.median(times) * 1e3


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(count)]


def message(rng: random.Random, length: int) -> list[dict[str, str]]:
    words = [rng.choice(["water", "wheel", "basin", "river", "stone", "gate", "level"]) for _ in range(length // 6)]
    return [{"role": "user", "content": " ".join(words)}]


def show(sides: list[Side], rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Print the table; returns its numbers."""
    table: dict[str, Any] = {}
    print(
        "| | "
        + " | ".join(side.name for side in sides)
        + " | ratio to the first |\n|---"
        + "|---" * (len(sides) + 1)
        + "|"
    )
    for line, note in LINES.items():
        values = {side.name: statistics.median(r[side.name][line] for r in rounds) for side in sides}
        ratios = [
            statistics.median(r[side.name][line] / max(r[sides[0].name][line], 1e-9) for r in rounds)
            for side in sides[1:]
        ]
        table[line] = {"values": values, "ratios": ratios}
        cells = [f"{value:,.4f}" if value < 1 else f"{value:,.1f}" for value in values.values()]
        label = f"{line} ({note})" if note else line
        print(f"| {label} | {' | '.join(cells)} | {', '.join(f'{ratio:.3f}' for ratio in ratios)} |")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", metavar="NAME=PYTHON", help="a server's Python; default: this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = [text.partition("=")[::2] for text in given.side or [f"here={sys.executable}"]]
    model = tiny_model()
    sides = [Side(name, python, PORT + number, model) for number, (name, python) in enumerate(chosen)]
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        for side in sides:
            ps.start(side.server, Path(tempfile.mkdtemp(prefix="forebay-api-")))
        for number in range(-1, given.rounds):  # the first round warms up
            order = random.Random(number).sample(sides, len(sides))
            figures = {side.name: asyncio.run(side.measure(number)) for side in order}
            if number >= 0:
                rounds.append(figures)
    finally:
        for side in sides:
            ps.stop(side.server)
    table = show(sides, rounds)
    if given.json:
        given.json.write_text(json.dumps({"schema": 1, "rounds": rounds, "table": table}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
