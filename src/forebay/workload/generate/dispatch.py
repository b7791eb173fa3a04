"""Rows to servers and answers to the journal: the event loop's side of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from forebay.errors import UsageError
from forebay.workload.answers import CompletionAnswer
from forebay.workload.failures import FailureKind, RequestFailure
from forebay.workload.generate.index import Index, input_changed
from forebay.workload.generate.journal import Journal, Record, read_turns
from forebay.workload.generate.progress import Progress, Tally
from forebay.workload.generate.rows import Malformed, Row
from forebay.workload.generate.server_pool import ServerEndpoint, ServerPool
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.generate.sources import RawRow, Rows
from forebay.workload.generate.turns import Turn, WorkItem, ask_turn

__all__ = ["Dispatcher"]

_SYNC_S = 0.05
_TICK_S = 0.02
_SLICE_ROWS = 64  # rows read between two looks at the network
_DEFAULT_PAUSE_S = 1.0  # after a 429 without Retry-After
_BACK_OFF_S = 0.5  # doubles with every try of a row


class Dispatcher:
    """Owns what is in flight. ``run`` is called once."""

    def __init__(
        self,
        settings: GenerateSettings,
        fleet: ServerPool,
        index: Index,
        journal: Journal,
        progress: Progress,
        tally: Tally,
    ) -> None:
        self.stopping = asyncio.Event()
        self._settings = settings
        self._fleet = fleet
        self._index = index
        self._journal = journal
        self._progress = progress
        self._tally = tally
        self._durable = tally.snapshot()
        self._delayed = 0
        self._unstarted: dict[asyncio.Task[Any] | None, WorkItem] = {}
        """Slots that have not taken their first step."""
        self._all_read = False
        self._fatal: BaseException | None = None
        self._model = ""

    def interrupt(self) -> None:
        """First call: drain. Second call: drop what is in flight."""
        if not self.stopping.is_set():
            self.stopping.set()
            self._progress.event("draining", in_flight=self._in_flight, hint="Ctrl-C again to stop at once")
            return
        for lane in self._fleet.lanes:
            for slot in list(lane.slots):
                slot.cancel()

    async def run(self, source: Rows, parse: Callable[[RawRow], Row | Malformed]) -> bool:
        """Generate every pending row; True when the user interrupted.

        Raises:
            DeadError, UsageError, RefusedError: as the lanes say; what was finished is in the journal.
        """
        assert self._fleet.identity is not None, "run comes after first_ready"
        self._model = self._fleet.identity.model
        helpers = [
            asyncio.create_task(self._feed(source, parse)),
            asyncio.create_task(self._sync()),
            asyncio.create_task(self._fleet.watch()),
            asyncio.create_task(self._fleet.count()),
        ]
        try:
            while not self._over():
                for helper in helpers:
                    if helper.done() and (error := helper.exception()) is not None:
                        raise error
                if self._fatal is not None:
                    raise self._fatal
                self._fill()
                self._progress.show(self._durable, self._limits(), self._fleet.errors)
                await asyncio.sleep(_TICK_S)
        finally:
            for helper in helpers:
                helper.cancel()
            for lane in self._fleet.lanes:
                for slot in list(lane.slots):
                    slot.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            self._journal.sync()
            self._progress.show(self._tally, self._limits(), self._fleet.errors, now=True)
        return self.stopping.is_set()

    @property
    def _in_flight(self) -> int:
        return sum(lane.in_flight for lane in self._fleet.lanes)

    def _limits(self) -> dict[str, int]:
        return {lane.url: lane.limit.value if lane.up else 0 for lane in self._fleet.lanes}

    def _over(self) -> bool:
        if self._in_flight:
            return False
        return self.stopping.is_set() or (self._all_read and not self._delayed and not self._fleet.waiting)

    def _fill(self) -> None:
        """Give every lane with room a slot for each row it may take now."""
        if self.stopping.is_set():
            return
        now = time.monotonic()
        for lane in self._fleet.lanes:
            while lane.has_room(now):
                work = self._fleet.next_work(lane)
                if work is None:
                    return
                lane.in_flight += 1
                slot = asyncio.create_task(self._slot(lane, work))
                lane.slots.add(slot)
                self._unstarted[slot] = work
                slot.add_done_callback(partial(self._slot_ended, lane))

    async def _slot(self, lane: ServerEndpoint, work: WorkItem | None) -> None:
        """One conversation after the other, as long as the lane has room for this slot."""
        self._unstarted.pop(asyncio.current_task(), None)
        try:
            while work is not None:
                try:
                    await self._converse(lane, work)
                except asyncio.CancelledError:
                    self._fleet.ready.appendleft(work)
                    raise
                if self.stopping.is_set() or lane.over_limit:
                    return
                work = self._fleet.next_work(lane)
        finally:
            lane.in_flight -= 1

    def _slot_ended(self, lane: ServerEndpoint, slot: asyncio.Task[None]) -> None:
        lane.slots.discard(slot)
        work = self._unstarted.pop(slot, None)
        if work is not None:
            # Cancelled before its first step: nothing of it ran, so what it would have given back is given back here.
            lane.in_flight -= 1
            self._fleet.ready.appendleft(work)
        if not slot.cancelled() and (error := slot.exception()) is not None:
            self._fatal = error

    async def _converse(self, lane: ServerEndpoint, work: WorkItem) -> None:
        """Every missing turn of one row, on one server; a failure sends the row back with the turns it has."""
        while len(work.answers) < len(work.row.prompts):
            if self.stopping.is_set():
                return
            started = time.monotonic()
            try:
                turn = await ask_turn(self._settings, self._model, work, self._measured(lane))
            except RequestFailure as failure:
                self._went_wrong(lane, work, failure, started)
                return
            if self._record(work, turn):
                return

    def _measured(self, lane: ServerEndpoint) -> Callable[[dict[str, Any]], Any]:
        async def chat(body: dict[str, Any]) -> CompletionAnswer:
            started = time.monotonic()
            answer = await lane.client.chat(body)
            tokens = answer.usage.completion_tokens if answer.usage else 1
            lane.limit.finished(started, time.monotonic(), tokens)
            return answer

        return chat

    def _record(self, work: WorkItem, turn: Turn) -> bool:
        """Journal a turn, and the row's end when it is one; True at the end."""
        answer, usage = turn.answer, turn.answer.usage
        number, before = len(work.answers), work.history
        work.add(answer.content)
        last = len(work.answers) == len(work.row.prompts)
        state = "set_aside" if turn.set_aside else "ok" if last else None
        why = f"turn {number + 1}: {turn.set_aside}" if turn.set_aside else None
        record = Record(
            work.hex_key,
            number,
            before,
            answer.content,
            answer.reasoning,
            answer.finish_reason,
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            (usage.cached_tokens or 0) if usage else 0,
            [gate.value for gate in turn.gates],
            turn.attempts,
            state,
            why,
        )
        at, length = self._journal.append(record)
        self._index.add_turn(record, at, length)
        self._count(turn, state)
        return state is not None

    def _count(self, turn: Turn, state: str | None) -> None:
        tally, usage = self._tally, turn.answer.usage
        tally.turns += 1
        tally.gates.update(gate.value for gate in turn.gates)
        if usage is not None:
            tally.prompt_tokens += usage.prompt_tokens
            tally.output_tokens += usage.completion_tokens
            tally.cached_known = tally.cached_known or usage.cached_tokens is not None
            tally.cached_tokens += usage.cached_tokens or 0
        if state is not None:
            tally.rows += 1
            tally.rows_here += 1
            tally.set_aside += state == "set_aside"

    def _went_wrong(self, lane: ServerEndpoint, work: WorkItem, failure: RequestFailure, started: float) -> None:
        """Whose fault is it: the server's (wait for it), everybody's (stop), or this row's (try again, then fail)?"""
        now = time.monotonic()
        self._fleet.errors[failure.kind.value] += 1
        if failure.kind is FailureKind.RATE_LIMITED:
            lane.limit.throttled(started, now)
            pause = failure.retry_after_s if failure.retry_after_s is not None else _DEFAULT_PAUSE_S
            lane.paused_until = max(lane.paused_until, now + pause)
            self._fleet.ready.appendleft(work)
        elif failure.kind is FailureKind.NOT_ALLOWED:
            self._fatal = UsageError(
                f"{lane.url} refuses every request: {failure.message}",
                fix="check --model, the address and --api-key; finished rows are kept",
            )
        elif failure.kind is FailureKind.REFUSED:
            self._fail(work, failure.message)
        else:
            lane.limit.failed(started, now)
            if failure.retry_after_s is not None:
                lane.paused_until = max(lane.paused_until, now + failure.retry_after_s)
            if failure.server_is_away and lane.up:
                self._fleet.take_out(lane, failure.message)
            work.tries += failure.kind is not FailureKind.CONNECT and failure.kind is not FailureKind.UNAVAILABLE
            if work.tries >= self._settings.row_tries:
                self._fail(work, f"{work.tries} tries, the last one: {failure.message}")
            else:
                self._again_later(work, 0.0 if failure.server_is_away else _BACK_OFF_S * 2**work.tries)

    def _fail(self, work: WorkItem, why: str) -> None:
        self._journal.append(Record(work.hex_key, e="failed", w=why))
        self._index.add_failure(work.key, why)
        self._tally.rows += 1
        self._tally.rows_here += 1
        self._tally.failed += 1

    def _again_later(self, work: WorkItem, delay_s: float) -> None:
        self._delayed += 1

        def back() -> None:
            self._delayed -= 1
            self._fleet.ready.appendleft(work)

        asyncio.get_running_loop().call_later(delay_s, back)

    async def _feed(self, source: Rows, parse: Callable[[RawRow], Row | Malformed]) -> None:
        """Keep about a window of pending rows ready, sorted so that common prefixes lie side by side."""
        rows = islice(source.rows(), self._index.input_rows)
        window: list[WorkItem] = []
        pos = 0
        while batch := list(islice(rows, _SLICE_ROWS)):
            window += self._pending(pos, batch, parse)
            pos += len(batch)
            await asyncio.sleep(0)
            # The first rows go out at once, in small windows: servers need not wait for a large one to be read.
            if len(window) >= min(self._settings.window_rows, max(_SLICE_ROWS, pos)):
                await self._release(window)
                window = []
        if pos != self._index.input_rows:
            raise input_changed(f"it had {self._index.input_rows:,} rows, and has {pos:,}")
        await self._release(window)
        self._all_read = True

    def _pending(self, pos: int, rows: list[RawRow], parse: Callable[[RawRow], Row | Malformed]) -> list[WorkItem]:
        works = []
        for entry, raw in zip(self._index.window(pos, pos + len(rows)), rows, strict=True):
            if entry.state is not None:
                continue
            row = parse(raw)
            entry.check(row)
            if isinstance(row, Malformed):
                continue
            work = WorkItem(entry.key, row)
            if entry.turns:
                for turn in read_turns(self._journal.fd, entry.key, self._index.turn_places(entry.key)):
                    work.add(turn.c)
            works.append(work)
        return works

    async def _release(self, window: list[WorkItem]) -> None:
        window.sort(key=lambda work: work.row.prefix)
        self._fleet.ready.extend(window)
        self._fill()
        while len(self._fleet.ready) > self._settings.window_rows // 2 and not self.stopping.is_set():
            await asyncio.sleep(_TICK_S)

    async def _sync(self) -> None:
        """Back-to-back syncs on a thread; what is shown as finished is what the disk has."""
        while True:
            await asyncio.sleep(_SYNC_S)
            snapshot = self._tally.snapshot()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.to_thread(self._journal.sync))
                self._durable = snapshot
                continue
            return
