"""Send a load to a server and measure the times."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from forebay.workload.bench.load_script import LoadScript, Session
from forebay.workload.bench.samples import RequestSample
from forebay.workload.client import Client, Streamed
from forebay.workload.failures import RequestFailure

__all__ = ["LoadResult", "run_load"]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The samples of a load. ``own_cpu`` is the share of one core this process used: near 1, the bench was the
    bottleneck.
    """

    samples: list[RequestSample]
    seconds: float
    own_cpu: float


async def run_load(
    client: Client,
    model: str,
    script: LoadScript,
    *,
    concurrency: int,
    temperature: float = 0.0,
    on_sample: Callable[[RequestSample], None] = lambda _sample: None,
) -> LoadResult:
    """Run every session; a failed request ends its session and is counted, never repeated.

    Closed loop: ``concurrency`` sessions at once, in order. Open loop (timed sessions): each at its time, without a
        limit.
    """
    runner = _LoadRunner(client, model, temperature, on_sample)
    cpu = time.process_time()
    if script.timed:
        await asyncio.gather(*[runner.open_loop_session(session) for session in script.sessions])
    else:
        waiting = iter(script.sessions)
        await asyncio.gather(*[runner.closed_loop(waiting) for _ in range(concurrency)])
    seconds = time.perf_counter() - runner.zero
    return LoadResult(runner.samples, seconds, (time.process_time() - cpu) / max(seconds, 1e-9))


class _LoadRunner:
    def __init__(
        self, client: Client, model: str, temperature: float, on_sample: Callable[[RequestSample], None]
    ) -> None:
        self.zero = time.perf_counter()
        self.samples: list[RequestSample] = []
        self._client = client
        self._model = model
        self._temperature = temperature
        self._on_sample = on_sample

    async def closed_loop(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            await self._session(session, self._now())

    async def open_loop_session(self, session: Session) -> None:
        assert session.at is not None, "an open loop has times"
        await asyncio.sleep(max(0.0, session.at - self._now()))
        await self._session(session, session.at)

    def _now(self) -> float:
        return time.perf_counter() - self.zero

    async def _session(self, session: Session, due: float) -> None:
        answers: list[str] = []
        for turn in range(session.turns):
            request = session.request(turn, answers)
            body = {
                "model": self._model,
                "max_tokens": request.max_tokens,
                "temperature": self._temperature,
                **request.body,
                **({"ignore_eos": True} if request.fixed_length else {}),
            }
            sample = RequestSample(session.number, turn, due, self._now(), reused_tokens=request.reused_tokens)
            try:
                streamed = await self._client.stream(body, path=request.path)
            except RequestFailure as failure:
                sample.error = failure.kind.value
                sample.finished = self._now()
            else:
                self._take(sample, streamed)
                answers.append("".join(streamed.text_parts))
            self.samples.append(sample)
            self._on_sample(sample)
            if sample.error is not None:
                return
            due = self._now()

    def _take(self, sample: RequestSample, streamed: Streamed) -> None:
        times = streamed.token_times
        sample.finished = streamed.finished - self.zero
        sample.usage = streamed.usage
        if not times:
            sample.error = "no_tokens"
            return
        sample.first = times[0] - self.zero
        sample.gaps = array("f", [after - before for before, after in pairwise(times)])
