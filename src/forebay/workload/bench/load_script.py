"""The load: sessions, their turns and their times; a function of the settings, the prompt generator and the salt."""

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
    """One request: path, the prompt part of the body, the longest answer, and how many prompt tokens repeat earlier
    prompts.
    """

    path: str
    body: dict[str, Any]
    max_tokens: int
    fixed_length: bool
    reused_tokens: int | None


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another. ``request(n, answers)`` is the n-th, given the answers so far."""

    number: int
    at: float | None  # seconds after the start; None: when a session before it has ended
    turns: int
    request: Callable[[int, list[str]], TurnRequest]


@dataclass(frozen=True, slots=True)
class LoadScript:
    """A load. ``left_out`` counts trace records that were longer than the limit."""

    sessions: list[Session]
    requests: int
    left_out: int = 0

    @property
    def timed(self) -> bool:
        """Whether sessions have start times (open loop)."""
        return bool(self.sessions) and self.sessions[0].at is not None


def write_script(settings: BenchSettings, generator: PromptGenerator) -> LoadScript:
    """The script of one run.

    Raises:
        UsageError: the trace or prompts file is missing or not of its format.
    """
    arrivals = _arrivals(settings, generator)
    left_out = 0
    if settings.workload is Workload.CHAT:
        sessions = [_chat(settings, generator, n, next(arrivals)) for n in range(settings.session_count)]
    elif settings.workload is Workload.FIXED:
        sessions = [_fixed(settings, generator, n, next(arrivals)) for n in range(settings.session_count)]
    elif settings.workload is Workload.TRACE:
        sessions, left_out = _trace(settings, generator)
    else:
        sessions = [
            _own_prompts_session(settings, n, turns, next(arrivals)) for n, turns in enumerate(_own_prompts(settings))
        ]
    if not sessions:
        raise UsageError("the workload has no requests", fix="raise --sessions or --max-input-tokens")
    return LoadScript(sessions, sum(session.turns for session in sessions), left_out)


def _arrivals(settings: BenchSettings, generator: PromptGenerator) -> Iterator[float | None]:
    """Poisson arrival times for a rate; None for each session of a closed loop."""
    chosen, at = random.Random(f"arrivals {generator.salt}"), 0.0
    while True:
        if settings.rate is None:
            yield None
        else:
            yield at
            at += chosen.expovariate(settings.rate)


def _chat(settings: BenchSettings, generator: PromptGenerator, number: int, at: float | None) -> Session:
    group = number % settings.groups
    system = {"role": "system", "content": generator.text(("system", group), settings.system_tokens)}
    prompts = [generator.text(("user", number, turn), settings.user_tokens) for turn in range(settings.turns)]

    def request(turn: int, answers: list[str]) -> TurnRequest:
        messages = [system]
        for prompt, answer in zip(prompts, answers):
            messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": prompts[turn]})
        shared = settings.system_tokens if number >= settings.groups or turn else 0
        reused = shared + turn * (settings.user_tokens + settings.output_tokens)
        return TurnRequest(CHAT, {"messages": messages}, settings.output_tokens, True, reused)

    return Session(number, at, settings.turns, request)


def _prompt_body(generator: PromptGenerator, blocks: list[tuple[object, int]]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request whose prompt is made of named blocks."""
    if generator.highest_id is not None:
        return COMPLETIONS, {"prompt": [token for name, count in blocks for token in generator.ids(name, count)]}
    text = " ".join(generator.text(name, count) for name, count in blocks)
    return CHAT, {"messages": [{"role": "user", "content": text}]}


def _fixed(settings: BenchSettings, generator: PromptGenerator, number: int, at: float | None) -> Session:
    def request(_turn: int, _answers: list[str]) -> TurnRequest:
        path, body = _prompt_body(generator, [(("fixed", number), settings.input_tokens)])
        return TurnRequest(path, body, settings.output_tokens, True, 0)

    return Session(number, at, 1, request)


def _trace(settings: BenchSettings, generator: PromptGenerator) -> tuple[list[Session], int]:
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
        sessions.append(_trace_session(settings, generator, len(sessions), at, hashes, length, output, reused))
    if sessions and sessions[0].at is not None:
        start = sessions[0].at
        sessions = [Session(s.number, (s.at or 0.0) - start, s.turns, s.request) for s in sessions]
    return sessions, left_out


def _trace_session(
    settings: BenchSettings,
    generator: PromptGenerator,
    number: int,
    at: float | None,
    hashes: list[int],
    length: int,
    output: int,
    reused: int,
) -> Session:
    def request(_turn: int, _answers: list[str]) -> TurnRequest:
        blocks: list[tuple[object, int]] = []
        left = length
        for place, block in enumerate(hashes):
            count = min(settings.block_tokens, left)
            if count:
                blocks.append((("trace", place, block), count))
            left -= count
        if left:
            blocks.append((("trace", "rest", number), left))
        path, body = _prompt_body(generator, blocks)
        return TurnRequest(path, body, output, True, reused)

    return Session(number, at, 1, request)


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
    """The messages of each row of the user's file, without assistant turns."""
    from forebay.workload.generate.rows import Malformed, parse_row
    from forebay.workload.generate.sources import open_source

    assert settings.prompts is not None, "checked with the settings"
    for number, raw in enumerate(islice(open_source(settings.prompts).rows(), settings.sessions), start=1):
        row = parse_row(raw)
        if isinstance(row, Malformed):
            raise UsageError(f"{settings.prompts}, row {number}: {row.reason}")
        system = [{"role": "system", "content": text} for text in row.system]
        yield system + [{"role": "user", "content": text} for text in row.prompts]


def _own_prompts_session(
    settings: BenchSettings, number: int, messages: list[dict[str, str]], at: float | None
) -> Session:
    system = [message for message in messages if message["role"] == "system"]
    prompts = messages[len(system) :]

    def request(turn: int, answers: list[str]) -> TurnRequest:
        messages_so_far = list(system)
        for prompt, answer in zip(prompts, answers):
            messages_so_far += [prompt, {"role": "assistant", "content": answer}]
        return TurnRequest(CHAT, {"messages": [*messages_so_far, prompts[turn]]}, settings.output_tokens, False, None)

    return Session(number, at, len(prompts), request)
