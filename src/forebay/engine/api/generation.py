"""One request on its way: its choices' tokens come in, pieces of text go out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from forebay.engine.api.errors import ApiError
from forebay.engine.api.text.stop_strings import StopStringMatcher
from forebay.engine.api.text.tokenizer import ModelTokenizer
from forebay.engine.ipc.messages import TokenEvent

__all__ = ["Choice", "Delta", "Generation", "TokenLogprob", "TokenUsage"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token's log-probability, with the best alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Delta:
    """What is new of one choice since the last time."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Everything generated, the ending token included; ``text`` leaves that out and may lag behind."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None

    def add(self, later: Delta) -> None:
        """Append what came after it."""
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish = later.finish


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a request; ``cached`` is by device, host and disk, and adds up."""

    prompt_tokens: int
    completion_tokens: int
    cached: tuple[int, int, int]


class Choice:
    """One sequence's text.

    Args:
        seq_id: the scheduler's number for it.
        index: the number the client sees.
        codec: the tokenizer.
        stops: strings that end it.
        min_tokens: ``stops`` count only after this many tokens.
    """

    def __init__(self, seq_id: int, index: int, codec: ModelTokenizer, stops: tuple[str, ...], min_tokens: int) -> None:
        self.seq_id = seq_id
        self.index = index
        self.num_tokens = 0
        self.cached: tuple[int, int, int] | None = None
        self.is_finished = False
        self.last_token_at = 0.0
        self._detokenizer = codec.detokenizer()
        self._stops = StopStringMatcher(stops)
        self._min_tokens = min_tokens

    def push(self, event: TokenEvent) -> Delta:
        """Take a token; returns what may be shown. A found stop string finishes the choice."""
        self.num_tokens += 1
        if event.cached is not None:
            self.cached = event.cached
        delta = Delta(self.index, tokens=[event.token])
        if event.finish != "stop":  # the token that ends it is not part of the text
            self._show(delta, self._detokenizer.push(event.token))
            if event.logprob is not None:
                delta.logprobs.append(TokenLogprob(event.token, event.logprob, event.top_logprobs))
        if self._stops.is_stopped:
            delta.finish = "stop"
        elif event.finish is not None:
            self._show(delta, self._detokenizer.finish())
            delta.text += self._stops.finish()
            delta.finish = "stop" if self._stops.is_stopped else event.finish
        self.is_finished = delta.finish is not None
        return delta

    def _show(self, delta: Delta, text: str) -> None:
        delta.text += self._stops.push(text) if self.num_tokens > self._min_tokens else text


class Generation:
    """All choices of one request. Lives on the event loop.

    Args:
        choices: prompt by prompt.
        prompt_lengths: tokens of each prompt.
        choices_per_prompt: how many of ``choices`` belong to one prompt; the first one's cached tokens are the usage's.
        arrived_at: ``time.perf_counter()`` when the request came.
    """

    def __init__(
        self, choices: list[Choice], *, prompt_lengths: list[int], choices_per_prompt: int, arrived_at: float
    ) -> None:
        self.arrived_at = arrived_at
        self.choices = choices
        self._by_id = {choice.seq_id: choice for choice in choices}
        self._prompt_lengths = prompt_lengths
        self._choices_per_prompt = choices_per_prompt
        self._pending: dict[int, Delta] = {}
        self._news = asyncio.Event()
        self._error: ApiError | None = None
        self._is_cancelled = False

    @property
    def seq_ids(self) -> tuple[int, ...]:
        return tuple(self._by_id)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Sequences that still generate."""
        return tuple(choice.seq_id for choice in self.choices if not choice.is_finished)

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def usage(self) -> TokenUsage:
        """Counts so far."""
        cached = [choice.cached or (0, 0, 0) for choice in self.choices[:: self._choices_per_prompt]]
        return TokenUsage(
            prompt_tokens=sum(self._prompt_lengths),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached=(sum(c[0] for c in cached), sum(c[1] for c in cached), sum(c[2] for c in cached)),
        )

    def prompt_length(self, choice: Choice) -> int:
        """Tokens of the prompt that ``choice`` continues."""
        return self._prompt_lengths[choice.index // self._choices_per_prompt]

    def choice(self, seq_id: int) -> Choice:
        """The choice of a sequence."""
        return self._by_id[seq_id]

    def push(self, event: TokenEvent) -> bool:
        """Take one token; True when its sequence is over for the client although the scheduler goes on (a stop
        string).
        """
        choice = self._by_id[event.seq_id]
        delta = choice.push(event)
        waiting = self._pending.get(choice.index)
        if waiting is None:
            self._pending[choice.index] = delta
        else:
            waiting.add(delta)
        self._news.set()
        return delta.finish is not None and event.finish is None

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        self._error = error
        self._news.set()

    def cancel(self) -> None:
        """The client is gone."""
        self._is_cancelled = True
        self._news.set()

    async def next_deltas(self) -> list[Delta]:
        """Wait for news; an empty list means that there will be no more (all finished, or the client is gone).

        Raises:
            ApiError: the request failed.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._is_cancelled or not self.unfinished:
                return []
            self._news.clear()
            await self._news.wait()
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas
