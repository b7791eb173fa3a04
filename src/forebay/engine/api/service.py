"""Between HTTP and the engine: takes requests in, hands tokens out, counts."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from forebay.engine.api.engine_client import EngineClient
from forebay.engine.api.errors import ApiError, overloaded, unavailable
from forebay.engine.api.generation import Choice, Generation
from forebay.engine.api.http.limits import ConnectionLimits, connections_that_fit
from forebay.engine.api.metrics import ServerMetrics
from forebay.engine.api.openai.requests import GenerationRequest, ModelLimits
from forebay.engine.api.server_state import ServerState
from forebay.engine.api.text.chat_template import ChatTemplate
from forebay.engine.api.text.tokenizer import ModelTokenizer
from forebay.engine.config import EngineConfig
from forebay.engine.ipc.messages import StepReport, Submit, TokenEvent, pack_tokens
from forebay.engine.sampling_params import SamplingParams

__all__ = ["ModelTextAssets", "Service"]

_STATS_TIMEOUT_S = 1.0
_MOST_RETRY_AFTER_S = 60


class ModelTextAssets:
    """Tokenizer, chat template and end tokens of the model: read from its folder, off the event loop."""

    def __init__(self, folder: Path) -> None:
        self.codec = ModelTokenizer(folder)
        self.template = ChatTemplate.from_folder(folder)
        self.end_tokens = _end_tokens(folder, self.codec)

    def drop_end_tokens_beyond(self, vocab_size: int) -> tuple[int, ...]:
        """Forget end tokens that the model has no logits for, and so can never generate; returns them."""
        outside = tuple(token for token in self.end_tokens if not 0 <= token < vocab_size)
        self.end_tokens = tuple(token for token in self.end_tokens if token not in outside)
        return outside


class Service:
    """One server's requests. Lives on the event loop.

    Args:
        config: what was asked for.
        state: phase and stage, shared with the process's main.
        engine: the ranks.
    """

    def __init__(self, config: EngineConfig, state: ServerState, engine: EngineClient) -> None:
        self.config = config
        self.state = state
        self.engine = engine
        self.connection_limits = ConnectionLimits(
            max_connections=connections_that_fit(config.http.max_connections), timeout_s=config.http.client_timeout_s
        )
        self.metrics = ServerMetrics()
        self.info: dict[str, Any] = {}
        self.text: ModelTextAssets | None = None
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._ids = itertools.count(1)
        self._live: dict[int, Generation] = {}
        self._last_stats: dict[str, Any] = {}
        self._probes: set[int] = set()
        """Sequences of ``probe``: no user's requests."""
        self._num_requests = 0
        self._accepting: set[asyncio.Task[None]] = set()
        """Requests that are still read, rendered and tokenized."""
        self._has_no_requests = asyncio.Event()
        self._has_no_requests.set()
        self._closing_error: ApiError | None = None
        self._finish_times: deque[float] = deque(maxlen=64)

    @property
    def num_requests(self) -> int:
        """Requests whose answers are not all sent yet, from the moment their head was read."""
        return self._num_requests

    @property
    def limits(self) -> ModelLimits:
        """What requests are checked against; only once rank 0 is ready."""
        names = dict.fromkeys((self.config.served_name, self.config.model.model))
        return ModelLimits(tuple(names), int(self.info["context_length"]), int(self.info["vocab_size"]))

    def admit(self, task: asyncio.Task[None]) -> None:
        """See ``Admission``."""
        self.check_open()
        self._num_requests += 1
        self._has_no_requests.clear()
        self._accepting.add(task)

    def accepted(self, task: asyncio.Task[None]) -> None:
        """See ``Admission``."""
        self._accepting.discard(task)

    def leave(self) -> None:
        """See ``Admission``."""
        self._num_requests -= 1
        if not self._num_requests:
            self._has_no_requests.set()

    def closing_error(self) -> ApiError | None:
        """See ``Admission``."""
        return self._closing_error

    def refused(self, status: int) -> None:
        """See ``Admission``."""
        self.metrics.refused(status)

    async def wait_until_idle(self) -> None:
        """Until every request has its answer."""
        await self._has_no_requests.wait()

    def close(self, error: ApiError) -> None:
        """Answer every request that is not over with ``error``, those included that are not in the engine yet."""
        self._closing_error = error
        for task in self._accepting:
            task.cancel()
        for generation in set(self._live.values()):
            generation.fail(error)
        for seq_id in list(self._live):
            self._forget(seq_id, "error")

    def check_open(self) -> None:
        """Refuse while starting, draining or dead.

        Raises:
            ApiError: 503.
        """
        if not self.state.is_ready:
            raise unavailable(self.state.refusal(), self.state.phase.value)

    async def submit(self, request: GenerationRequest) -> tuple[Generation, list[str]]:
        """Encode, check and queue a request; returns it with the text to echo per choice.

        Raises:
            ApiError: 400 where it cannot fit, 429 where the queue is full.
        """
        arrived_at = time.perf_counter()
        assert self.text is not None
        self._check_room(len(request.prompts) * request.choices.n)
        codec = self.text.codec
        prompts = await asyncio.get_running_loop().run_in_executor(self.threads, request.encode, codec)
        for prompt in prompts:
            self._check_tokens(prompt, request)
        budgets = [request.max_tokens(prompt, self.limits) for prompt in prompts]
        self._check_room(len(prompts) * request.choices.n)
        choices: list[Choice] = []
        submits: list[Submit] = []
        for prompt, max_tokens in zip(prompts, budgets, strict=True):
            packed = pack_tokens(prompt)
            for number in range(request.choices.n):
                seq_id = next(self._ids)
                options = request.choices
                choices.append(Choice(seq_id, len(choices), codec, options.stops, options.sampling.min_tokens))
                submits.append(Submit(seq_id, packed, self._sampling(request, max_tokens, number)))
        generation = Generation(
            choices,
            prompt_lengths=[len(prompt) for prompt in prompts],
            choices_per_prompt=request.choices.n,
            arrived_at=arrived_at,
        )
        self._live.update((choice.seq_id, generation) for choice in choices)
        self.engine.submit(submits)
        echoes = [""] * len(choices)
        if request.echo:
            texts = [p.text if p.text is not None else codec.decode(p.tokens or []) for p in request.prompts]
            echoes = [text for text in texts for _ in range(request.choices.n)]
        return generation, echoes

    async def probe(self) -> float:
        """Generate one token past all limits; returns the seconds it took. The metrics of requests leave it out.

        Raises:
            ApiError: the engine failed meanwhile.
        """
        assert self.text is not None
        began = time.perf_counter()
        choice = Choice(next(self._ids), 0, self.text.codec, (), 0)
        generation = Generation([choice], prompt_lengths=[1], choices_per_prompt=1, arrived_at=began)
        self._live[choice.seq_id] = generation
        self._probes.add(choice.seq_id)
        prompt = pack_tokens([self.text.end_tokens[0] if self.text.end_tokens else 0])
        self.engine.submit([Submit(choice.seq_id, prompt, SamplingParams(temperature=0.0))])
        try:
            while await generation.next_deltas():
                pass
        finally:
            self.end(generation)
            self._probes.discard(choice.seq_id)
        seconds = time.perf_counter() - began
        self.metrics.probed(seconds)
        return seconds

    def on_step(self, report: StepReport) -> None:
        """Hand a step's tokens to their requests."""
        self.metrics.step(report, len(self._probes.intersection(event.seq_id for event in report.events)))
        now = time.perf_counter()
        stopped = []
        for event in report.events:
            generation = self._live.get(event.seq_id)
            if generation is None:
                continue  # cancelled; the scheduler had not heard of it yet
            self._observe(generation, event, now)
            if generation.push(event):
                stopped.append(event.seq_id)
            choice = generation.choice(event.seq_id)
            if choice.is_finished:
                self._forget(event.seq_id, event.finish or "stop")
        self.engine.abort(tuple(stopped))

    def end(self, generation: Generation) -> None:
        """The response is over: abort what still runs (the client hung up)."""
        unfinished = tuple(seq_id for seq_id in generation.unfinished if seq_id in self._live)
        for seq_id in unfinished:
            self._forget(seq_id, "cancelled")
        self.engine.abort(unfinished)

    async def stats(self) -> dict[str, Any]:
        """Rank 0's numbers now; the last known ones while it is busy with a long step or not there."""
        if self.state.is_ready or self._last_stats:
            try:
                self._last_stats = await self.engine.call("stats", timeout_s=_STATS_TIMEOUT_S)
                self.metrics.requests(**_request_states(self._last_stats))
            except (TimeoutError, ApiError):
                pass
        return self._last_stats

    def _observe(self, generation: Generation, event: TokenEvent, now: float) -> None:
        if event.seq_id in self._probes:
            return
        choice = generation.choice(event.seq_id)
        if event.cached is not None:
            prompt_tokens = generation.prompt_length(choice)
            self.metrics.first_token(now - generation.arrived_at, prompt_tokens, event.cached)
        else:
            self.metrics.next_token(now - choice.last_token_at)
        choice.last_token_at = now

    def _forget(self, seq_id: int, reason: str) -> None:
        self._live.pop(seq_id, None)
        if seq_id in self._probes:
            return
        self._finish_times.append(time.monotonic())
        self.metrics.finished(reason)

    def _check_room(self, count: int) -> None:
        """Refuse what would make the queue longer than --max-queue; a lone request of any width passes."""
        scheduler = self.config.scheduler
        if self._live and len(self._live) + count > scheduler.max_running + scheduler.max_queue:
            raise overloaded(self._retry_after_s())

    def _check_tokens(self, prompt: list[int], request: GenerationRequest) -> None:
        """Refuse a text with a token that the tokenizer knows and the model has no embedding for."""
        highest = max(prompt, default=0)
        if highest >= self.limits.vocab_size:
            assert self.text is not None
            spelled = self.text.codec.token_bytes(highest).decode("utf-8", "replace")
            raise ApiError(
                f"The text contains {spelled!r}, token {highest}, which the model's vocabulary of "
                f"{self.limits.vocab_size} does not have.",
                param="messages" if request.is_chat else "prompt",
            )

    def _retry_after_s(self) -> int:
        """Until about a quarter of the queue has gone, at the pace of the last requests."""
        times = self._finish_times
        if len(times) < 2:
            return 1
        pace_s = (time.monotonic() - times[0]) / len(times)
        return max(1, min(_MOST_RETRY_AFTER_S, math.ceil(pace_s * self.config.scheduler.max_queue / 4)))

    def _sampling(self, request: GenerationRequest, max_tokens: int, number: int) -> SamplingParams:
        """The settings of choice ``number`` of a prompt."""
        options = request.choices
        assert self.text is not None
        ends = () if options.ignore_eos else self.text.end_tokens
        return msgspec.structs.replace(
            options.sampling,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*ends, *options.sampling.stop_token_ids))),
            seed=(options.sampling.seed + number) % 2**63,
        )


def _request_states(stats: dict[str, Any]) -> dict[str, int]:
    requests = stats["requests"]
    return {state: int(requests[state]) for state in ("running", "waiting", "loading")}


def _end_tokens(folder: Path, codec: ModelTokenizer) -> tuple[int, ...]:
    """Tokens that end a text: generation_config.json's, else config.json's, and the tokenizer's own."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        settings = _json(folder / name)
        ids = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
        if ids is not None:
            found += ids if isinstance(ids, list) else [ids]
            break
    eos = _json(folder / "tokenizer_config.json").get("eos_token")
    spelled = eos.get("content") if isinstance(eos, dict) else eos
    token = codec.token_id(spelled) if isinstance(spelled, str) else None
    return tuple(dict.fromkeys([*found, *([] if token is None else [token])]))


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
