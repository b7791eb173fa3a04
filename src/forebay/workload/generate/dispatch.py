"""Send rows to servers and write answers to the journal."""

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

_SYNC_S = 0.05  # how often the journal is synced to disk
_TICK_S = 0.02
_SLICE_ROWS = 64  # rows read before the event loop handles the network again
_DEFAULT_PAUSE_S = 1.0  # after a 429 without Retry-After
_BACK_OFF_S = 0.5  # doubles with every try of a row


class Dispatcher:
    """Runs the requests of one job. ``run`` is called once."""

    def __init__(
        self,
        settings: GenerateSettings,
        pool: ServerPool,
        index: Index,
        journal: Journal,
        progress: Progress,
        tally: Tally,
    ) -> None:
        self.stopping = asyncio.Event()
        self._settings = settings
        self._pool = pool
        self._index = index
        self._journal = journal
        self._progress = progress
        self._tally = tally
        self._durable = tally.snapshot()
        self._delayed = 0
        self._unstarted: dict[asyncio.Task[Any] | None, WorkItem] = {}  # workers before their first step
        self._all_read = False
        self._fatal: BaseException | None = None
        self._model = ""

    def interrupt(self) -> None:
        """First call: finish the requests in flight and stop. Second call: cancel them."""
        if not self.stopping.is_set():
            self.stopping.set()
            self._progress.event("draining", in_flight=self._in_flight, hint="Ctrl-C again to stop at once")
            return
        self._cancel_workers()

    async def run(self, source: Rows, parse: Callable[[RawRow], Row | Malformed]) -> bool:
        """Generate every pending row; True when the user interrupted.

        Raises:
            DeadError, UsageError, RefusedError: see ``ServerPool``; finished turns are in the journal.
        """
        assert self._pool.identity is not None, "run comes after first_ready"
        self._model = self._pool.identity.model
        helpers = [
            asyncio.create_task(self._read_input(source, parse)),
            asyncio.create_task(self._sync_journal()),
            asyncio.create_task(self._pool.watch()),
            asyncio.create_task(self._pool.read_counters()),
        ]
        try:
            while not self._finished():
                for helper in helpers:
                    if helper.done() and (error := helper.exception()) is not None:
                        raise error
                if self._fatal is not None:
                    raise self._fatal
                self._start_workers()
                self._progress.show(self._durable, self._limits(), self._pool.errors)
                await asyncio.sleep(_TICK_S)
        finally:
            for helper in helpers:
                helper.cancel()
            self._cancel_workers()
            await asyncio.gather(*helpers, return_exceptions=True)
            self._journal.sync()
            self._progress.show(self._tally, self._limits(), self._pool.errors, now=True)
        return self.stopping.is_set()

    def _cancel_workers(self) -> None:
        for server in self._pool.servers:
            for worker in list(server.workers):
                worker.cancel()

    @property
    def _in_flight(self) -> int:
        return sum(server.in_flight for server in self._pool.servers)

    def _limits(self) -> dict[str, int]:
        return {server.url: server.limit.value if server.up else 0 for server in self._pool.servers}

    def _finished(self) -> bool:
        if self._in_flight:
            return False
        return self.stopping.is_set() or (self._all_read and not self._delayed and not self._pool.waiting)

    def _start_workers(self) -> None:
        """Start a worker for each row that a server may take now."""
        if self.stopping.is_set():
            return
        now = time.monotonic()
        for server in self._pool.servers:
            while server.has_room(now):
                work = self._pool.next_work(server)
                if work is None:
                    return
                server.in_flight += 1
                worker = asyncio.create_task(self._worker(server, work))
                server.workers.add(worker)
                self._unstarted[worker] = work
                worker.add_done_callback(partial(self._worker_ended, server))

    async def _worker(self, server: ServerEndpoint, work: WorkItem | None) -> None:
        """Generate one row after the other, as long as the server has room for this worker."""
        self._unstarted.pop(asyncio.current_task(), None)
        try:
            while work is not None:
                try:
                    await self._generate_row(server, work)
                except asyncio.CancelledError:
                    self._pool.ready.appendleft(work)
                    raise
                if self.stopping.is_set() or server.over_limit:
                    return
                work = self._pool.next_work(server)
        finally:
            server.in_flight -= 1

    def _worker_ended(self, server: ServerEndpoint, worker: asyncio.Task[None]) -> None:
        server.workers.discard(worker)
        work = self._unstarted.pop(worker, None)
        if work is not None:
            # Cancelled before its first step: its ``finally`` never ran.
            server.in_flight -= 1
            self._pool.ready.appendleft(work)
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self._fatal = error

    async def _generate_row(self, server: ServerEndpoint, work: WorkItem) -> None:
        """Generate the missing turns of one row on one server; a failure returns the row, with the turns it has."""
        while len(work.answers) < len(work.row.prompts):
            if self.stopping.is_set():
                return
            started = time.monotonic()
            try:
                turn = await ask_turn(self._settings, self._model, work, self._timed_chat(server))
            except RequestFailure as failure:
                self._handle_failure(server, work, failure, started)
                return
            if self._record(work, turn):
                return

    def _timed_chat(self, server: ServerEndpoint) -> Callable[[dict[str, Any]], Any]:
        async def chat(body: dict[str, Any]) -> CompletionAnswer:
            started = time.monotonic()
            answer = await server.client.chat(body)
            tokens = answer.usage.completion_tokens if answer.usage else 1
            server.limit.finished(started, time.monotonic(), tokens)
            return answer

        return chat

    def _record(self, work: WorkItem, turn: Turn) -> bool:
        """Write a turn to the journal; True when it is the row's last."""
        answer, usage = turn.answer, turn.answer.usage
        number, before = len(work.answers), work.history
        work.add(answer.content)
        last = len(work.answers) == len(work.row.prompts)
        state = "rejected" if turn.rejected else "ok" if last else None
        why = f"turn {number + 1}: {turn.rejected}" if turn.rejected else None
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
            [filter_.value for filter_ in turn.filters],
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
        tally.filters.update(filter_.value for filter_ in turn.filters)
        if usage is not None:
            tally.prompt_tokens += usage.prompt_tokens
            tally.output_tokens += usage.completion_tokens
            tally.cached_known = tally.cached_known or usage.cached_tokens is not None
            tally.cached_tokens += usage.cached_tokens or 0
        if state is not None:
            tally.rows += 1
            tally.rows_here += 1
            tally.rejected += state == "rejected"

    def _handle_failure(self, server: ServerEndpoint, work: WorkItem, failure: RequestFailure, started: float) -> None:
        """Wait for the server, stop the run, or try the row again later, by the kind of the failure."""
        now = time.monotonic()
        self._pool.errors[failure.kind.value] += 1
        if failure.kind is FailureKind.RATE_LIMITED:
            server.limit.throttled(started, now)
            pause = failure.retry_after_s if failure.retry_after_s is not None else _DEFAULT_PAUSE_S
            server.paused_until = max(server.paused_until, now + pause)
            self._pool.ready.appendleft(work)
        elif failure.kind is FailureKind.NOT_ALLOWED:
            self._fatal = UsageError(
                f"{server.url} refuses every request: {failure.message}",
                fix="check --model, the address and --api-key; finished rows are kept",
            )
        elif failure.kind is FailureKind.REFUSED:
            self._fail_row(work, failure.message)
        else:
            server.limit.failed(started, now)
            if failure.retry_after_s is not None:
                server.paused_until = max(server.paused_until, now + failure.retry_after_s)
            if failure.server_is_down and server.up:
                self._pool.mark_down(server, failure.message)
            work.tries += failure.kind is not FailureKind.CONNECT and failure.kind is not FailureKind.UNAVAILABLE
            if work.tries >= self._settings.row_tries:
                self._fail_row(work, f"{work.tries} tries, the last one: {failure.message}")
            else:
                self._retry_later(work, 0.0 if failure.server_is_down else _BACK_OFF_S * 2**work.tries)

    def _fail_row(self, work: WorkItem, reason: str) -> None:
        self._journal.append(Record(work.hex_key, e="failed", w=reason))
        self._index.add_failure(work.key, reason)
        self._tally.rows += 1
        self._tally.rows_here += 1
        self._tally.failed += 1

    def _retry_later(self, work: WorkItem, delay_s: float) -> None:
        self._delayed += 1

        def back() -> None:
            self._delayed -= 1
            self._pool.ready.appendleft(work)

        asyncio.get_running_loop().call_later(delay_s, back)

    async def _read_input(self, source: Rows, parse: Callable[[RawRow], Row | Malformed]) -> None:
        """Keep about one window of pending rows ready, sorted by prefix, so that rows with a common prefix go out
        together.
        """
        rows = islice(source.rows(), self._index.input_rows)
        window: list[WorkItem] = []
        pos = 0
        while batch := list(islice(rows, _SLICE_ROWS)):
            window += self._pending(pos, batch, parse)
            pos += len(batch)
            await asyncio.sleep(0)
            # The first windows are small, so that servers do not wait until a large one has been read.
            if len(window) >= min(self._settings.window_rows, max(_SLICE_ROWS, pos)):
                await self._enqueue(window)
                window = []
        if pos != self._index.input_rows:
            raise input_changed(f"it had {self._index.input_rows:,} rows, and has {pos:,}")
        await self._enqueue(window)
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

    async def _enqueue(self, window: list[WorkItem]) -> None:
        window.sort(key=lambda work: work.row.prefix)
        self._pool.ready.extend(window)
        self._start_workers()
        while len(self._pool.ready) > self._settings.window_rows // 2 and not self.stopping.is_set():
            await asyncio.sleep(_TICK_S)

    async def _sync_journal(self) -> None:
        """Sync the journal on a thread, again and again; a turn is shown as finished once it is on disk."""
        while True:
            await asyncio.sleep(_SYNC_S)
            snapshot = self._tally.snapshot()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.to_thread(self._journal.sync))
                self._durable = snapshot
                continue
            return
