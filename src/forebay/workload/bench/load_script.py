"""The load as a script: which sessions, which turns, when. A pure function of the settings, the maker and a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.workload.bench.prompts import PromptGenerator
from forebay.workload.bench.settings import BenchSettings, Workload
from forebay.workload.client import CHAT, COMPLETIONS

__all__ = ["LoadScript", "Session", "TurnRequest", "write_script"]

_TRACE_BLOCK = 512  # tokens a block id of a trace stands for


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One request to send: where, the prompt part of the body, the longest answer,
    and what of the prompt is a repetition.
    """

    path: str
    body: dict[str, Any]
    max_tokens: int
    fixed_length: bool
    reused_tokens: int | None


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another. ``ask(n, answers)`` is the n-th, given the answers so far."""

    number: int
    at: float | None  # seconds after the start; None: as soon as there is room
    turns: int
    ask: Callable[[int, list[str]], TurnRequest]


@dataclass(frozen=True, slots=True)
class LoadScript:
    """A load. ``left_out`` counts trace records that were too long."""

    sessions: list[Session]
    requests: int
    left_out: int = 0

    @property
    def timed(self) -> bool:
        """Whether sessions have their own times (open loop)."""
        return bool(self.sessions) and self.sessions[0].at is not None


def write_script(settings: BenchSettings, maker: PromptGenerator) -> LoadScript:
    """The script of one run.

    Raises:
        UsageError: the trace or prompts file is missing or not of its format.
    """
    arrivals = _arrivals(settings, maker)
    left_out = 0
    if settings.workload is Workload.CHAT:
        sessions = [_chat(settings, maker, n, next(arrivals)) for n in range(settings.session_count)]
    elif settings.workload is Workload.FIXED:
        sessions = [_fixed(settings, maker, n, next(arrivals)) for n in range(settings.session_count)]
    elif settings.workload is Workload.TRACE:
        sessions, left_out = _trace(settings, maker)
    else:
        sessions = [_own(settings, n, turns, next(arrivals)) for n, turns in enumerate(_own_prompts(settings))]
    if not sessions:
        raise UsageError("the workload has no requests", fix="raise --sessions or --max-input-tokens")
    return LoadScript(sessions, sum(session.turns for session in sessions), left_out)


def _arrivals(settings: BenchSettings, maker: PromptGenerator) -> Iterator[float | None]:
    """Poisson arrivals for a rate; None for ever in a closed loop."""
    chosen, at = random.Random(f"arrivals {maker.salt}"), 0.0
    while True:
        if settings.rate is None:
            yield None
        else:
            yield at
            at += chosen.expovariate(settings.rate)


def _chat(settings: BenchSettings, maker: PromptGenerator, number: int, at: float | None) -> Session:
    group = number % settings.groups
    system = {"role": "system", "content": maker.text(("system", group), settings.system_tokens)}
    prompts = [maker.text(("user", number, turn), settings.user_tokens) for turn in range(settings.turns)]

    def ask(turn: int, answers: list[str]) -> TurnRequest:
        messages = [system]
        for prompt, answer in zip(prompts, answers):
            messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": prompts[turn]})
        shared = settings.system_tokens if number >= settings.groups or turn else 0
        reused = shared + turn * (settings.user_tokens + settings.output_tokens)
        return TurnRequest(CHAT, {"messages": messages}, settings.output_tokens, True, reused)

    return Session(number, at, settings.turns, ask)


def _prompt_body(maker: PromptGenerator, blocks: list[tuple[object, int]]) -> tuple[str, dict[str, Any]]:
    """Path and body for a prompt made of named blocks."""
    if maker.highest_id is not None:
        return COMPLETIONS, {"prompt": [token for name, count in blocks for token in maker.ids(name, count)]}
    text = " ".join(maker.text(name, count) for name, count in blocks)
    return CHAT, {"messages": [{"role": "user", "content": text}]}


def _fixed(settings: BenchSettings, maker: PromptGenerator, number: int, at: float | None) -> Session:
    def ask(_turn: int, _answers: list[str]) -> TurnRequest:
        path, body = _prompt_body(maker, [(("fixed", number), settings.input_tokens)])
        return TurnRequest(path, body, settings.output_tokens, True, 0)

    return Session(number, at, 1, ask)


def _trace(settings: BenchSettings, maker: PromptGenerator) -> tuple[list[Session], int]:
    assert settings.trace is not None, "checked with the settings"
    scale = settings.block_tokens / _TRACE_BLOCK
    sessions: list[Session] = []
    seen: set[tuple[int, int]] = set()
    left_out = 0
    for record in _trace_records(settings.trace):
        if settings.sessions is not None and len(sessions) == settings.sessions:
            break
        length = max(1, round(record["input_length"] * scale))
        if settings.max_input_tokens is not None and length > settings.max_input_tokens:
            left_out += 1
            continue
        hashes: list[int] = record["hash_ids"]
        known = next((n for n, block in enumerate(hashes) if (n, block) not in seen), len(hashes))
        seen.update(enumerate(hashes))
        reused = min(known * settings.block_tokens, length)
        at = record["timestamp"] / 1000 / settings.speed if settings.timed else None
        output = max(1, round(record["output_length"] * scale))
        sessions.append(_trace_session(settings, maker, len(sessions), at, hashes, length, output, reused))
    if sessions and sessions[0].at is not None:
        start = sessions[0].at
        sessions = [Session(s.number, (s.at or 0.0) - start, s.turns, s.ask) for s in sessions]
    return sessions, left_out


def _trace_session(
    settings: BenchSettings,
    maker: PromptGenerator,
    number: int,
    at: float | None,
    hashes: list[int],
    length: int,
    output: int,
    reused: int,
) -> Session:
    def ask(_turn: int, _answers: list[str]) -> TurnRequest:
        blocks: list[tuple[object, int]] = []
        left = length
        for place, block in enumerate(hashes):
            count = min(settings.block_tokens, left)
            if count:
                blocks.append((("trace", place, block), count))
            left -= count
        if left:
            blocks.append((("trace", "rest", number), left))
        path, body = _prompt_body(maker, blocks)
        return TurnRequest(path, body, output, True, reused)

    return Session(number, at, 1, ask)


def _trace_records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(f"trace {path} is not there", fix="--trace FILE, or set FOREBAY_TRACE")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                lengths = (record["timestamp"], record["input_length"], record["output_length"])
                good = all(isinstance(value, int) for value in (*lengths, *record["hash_ids"]))
            except (ValueError, KeyError, TypeError):
                good = False
            if not good:
                raise UsageError(
                    f"{path}:{number} is no trace record",
                    fix="each line: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens)",
                )
            yield record


def _own_prompts(settings: BenchSettings) -> Iterator[list[dict[str, str]]]:
    """Messages without assistant turns, of each row of the user's file."""
    from forebay.workload.generate.rows import Malformed, parse_row
    from forebay.workload.generate.sources import open_source

    assert settings.prompts is not None, "checked with the settings"
    for number, raw in enumerate(islice(open_source(settings.prompts).rows(), settings.sessions), start=1):
        row = parse_row(raw)
        if isinstance(row, Malformed):
            raise UsageError(f"{settings.prompts}, row {number}: {row.reason}")
        system = [{"role": "system", "content": text} for text in row.system]
        yield system + [{"role": "user", "content": text} for text in row.prompts]


def _own(settings: BenchSettings, number: int, messages: list[dict[str, str]], at: float | None) -> Session:
    system = [message for message in messages if message["role"] == "system"]
    prompts = messages[len(system) :]

    def ask(turn: int, answers: list[str]) -> TurnRequest:
        asked = list(system)
        for prompt, answer in zip(prompts, answers):
            asked += [prompt, {"role": "assistant", "content": answer}]
        return TurnRequest(CHAT, {"messages": [*asked, prompts[turn]]}, settings.output_tokens, False, None)

    return Session(number, at, len(prompts), ask)
