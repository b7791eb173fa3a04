"""The servers of a run, one lane each: filled to its own measured limit, taken out when it dies,
put back when it is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable

from forebay.errors import DeadError, RefusedError, UsageError
from forebay.workload.client import Client
from forebay.workload.concurrency_limit import ConcurrencyLimit
from forebay.workload.counters import read_generated
from forebay.workload.failures import RequestFailure
from forebay.workload.generate.restart import ServerRestarter
from forebay.workload.generate.turns import WorkItem
from forebay.workload.target import ServerIdentity, identify, is_ready

__all__ = ["ServerEndpoint", "ServerPool"]

_LOOK_S = 5.0  # how often a lane in use is asked for its health
_SILENT_LOOKS = 4  # so many silent looks in a row, with requests outstanding, take a lane out
_LOOK_TIMEOUT_S = 10.0
_COUNT_S = 0.5  # how often a server's own count of tokens is read
_MEND_S = 0.5  # how often a lane that is out is asked
_RUN_ROWS = 32  # rows of one prefix that go to the same server in a row, at most


class ServerEndpoint:
    """One server. ``up`` says whether work may be sent; ``paused_until`` (monotonic seconds) honours Retry-After."""

    def __init__(self, url: str, client: Client, limit: ConcurrencyLimit) -> None:
        self.url = url
        self.client = client
        self.limit = limit
        self.up = False
        self.paused_until = 0.0
        self.in_flight = 0
        self.queue: deque[WorkItem] = deque()
        self.slots: set[asyncio.Task[None]] = set()
        self.deaths = 0

    def has_room(self, now: float) -> bool:
        """Whether one more conversation may start here now."""
        return self.up and now >= self.paused_until and self.in_flight < self.limit.value

    @property
    def over_limit(self) -> bool:
        """Whether a slot should end rather than take more work."""
        return not self.up or self.in_flight > self.limit.value or time.monotonic() < self.paused_until


class ServerPool:
    """All lanes, and the rows that wait for one.

    Args:
        model: the name the user wants, or None.
        reviver: starts servers; None leaves that to others.
        wait_s: how long every lane may be out before ``watch`` gives up.
        on_event: told of lanes going and coming: (event, url, detail).
    """

    def __init__(
        self,
        lanes: list[ServerEndpoint],
        *,
        model: str | None,
        reviver: ServerRestarter | None,
        wait_s: float,
        on_event: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        self.lanes = lanes
        self.ready: deque[WorkItem] = deque()
        self.errors: Counter[str] = Counter()
        self.identity: ServerIdentity | None = None
        self._model = model
        self._reviver = reviver
        self._wait_s = wait_s
        self._on_event = on_event
        self._mending: dict[str, asyncio.Task[None]] = {}
        self.failure: BaseException | None = None

    async def first_ready(self) -> ServerIdentity:
        """Wait until one lane is ready; returns what it serves.

        Raises:
            DeadError: none became ready in time.
            UsageError, RefusedError: it serves the wrong model.
        """
        for lane in self.lanes:
            self.take_out(lane, "not yet asked", silently=True)
        deadline = time.monotonic() + self._wait_s
        while self.identity is None:
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                raise self._nobody()
            await asyncio.sleep(0.02)
        return self.identity

    def take_out(self, lane: ServerEndpoint, why: str, *, silently: bool = False) -> None:
        """Send nothing more to a lane, give its waiting rows back, and begin to look for its return."""
        lane.up = False
        self.ready.extendleft(reversed(lane.queue))
        lane.queue.clear()
        if lane.url in self._mending:
            return
        if not silently:
            lane.deaths += 1
            self._on_event("server_out", lane.url, why)
        task = asyncio.create_task(self._mend(lane))
        self._mending[lane.url] = task
        task.add_done_callback(lambda done: self._mended(lane, done))

    def next_work(self, lane: ServerEndpoint) -> WorkItem | None:
        """The next row for a lane: rows of one prefix stay on one lane; an idle lane takes from the longest queue."""
        if lane.queue:
            return lane.queue.popleft()
        if self.ready:
            first = self.ready.popleft()
            if len(self.lanes) > 1:
                self._claim_run(lane, first)
            return first
        longest = max(self.lanes, key=lambda other: len(other.queue))
        return longest.queue.pop() if longest.queue else None

    def _claim_run(self, lane: ServerEndpoint, first: WorkItem) -> None:
        share = min(_RUN_ROWS, max(1, lane.limit.value // 2))
        opening = first.row.prefix[0]
        while self.ready and len(lane.queue) < share and self.ready[0].row.prefix[0] == opening:
            lane.queue.append(self.ready.popleft())

    @property
    def waiting(self) -> int:
        """Rows handed out to nobody yet."""
        return len(self.ready) + sum(len(lane.queue) for lane in self.lanes)

    async def watch(self) -> None:
        """Until cancelled: look after lanes in use, and give up when all were out for too long.

        Raises:
            DeadError: every server is away.
        """
        silent: Counter[str] = Counter()
        out_since: float | None = None
        while True:
            await asyncio.sleep(_LOOK_S if any(lane.up for lane in self.lanes) else _MEND_S)
            if self.failure is not None:
                raise self.failure
            if any(lane.up for lane in self.lanes):
                out_since = None
            else:
                out_since = out_since or time.monotonic()
                if time.monotonic() - out_since > self._wait_s:
                    raise self._nobody()
            for lane in self.lanes:
                if lane.up and lane.in_flight and not await is_ready(lane.client, timeout_s=_LOOK_TIMEOUT_S):
                    silent[lane.url] += 1
                    if silent[lane.url] >= _SILENT_LOOKS:
                        self._abandon(lane)
                else:
                    silent[lane.url] = 0

    async def count(self) -> None:
        """Until cancelled: tell each lane's limit what its server has generated, where the server counts that."""
        kind = self.identity.kind if self.identity is not None else "unknown"
        while True:
            await asyncio.sleep(_COUNT_S)
            for lane in self.lanes:
                if lane.up and (generated := await read_generated(lane.client, kind)) is not None:
                    lane.limit.counted(generated, time.monotonic(), full=lane.in_flight >= lane.limit.value)

    async def close(self) -> None:
        """Stop looking after lanes and close their connections."""
        for task in list(self._mending.values()):
            task.cancel()
        await asyncio.gather(*self._mending.values(), return_exceptions=True)
        for lane in self.lanes:
            await lane.client.close()

    def _abandon(self, lane: ServerEndpoint) -> None:
        self.take_out(lane, "its health was silent")
        for slot in list(lane.slots):
            slot.cancel()

    async def _mend(self, lane: ServerEndpoint) -> None:
        if self._reviver is not None and not await is_ready(lane.client):
            await self._reviver.start()
        while True:
            if await is_ready(lane.client) and await self._accept(lane):
                return
            await asyncio.sleep(_MEND_S)
            if self._reviver is not None and not await _listens(lane.client):
                await self._reviver.start()

    async def _accept(self, lane: ServerEndpoint) -> bool:
        """Check that a lane that came (back) serves what the others serve."""
        try:
            identity = await identify(lane.client, model=self._model)
        except RequestFailure:
            return False
        if self.identity is None:
            self.identity = identity
        elif identity != self.identity:
            raise RefusedError(
                f"{lane.url} does not serve what the run began with: {identity} instead of {self.identity}",
                fix="leave that server out, or start it with the same model and settings",
            )
        return True

    def _mended(self, lane: ServerEndpoint, done: asyncio.Task[None]) -> None:
        self._mending.pop(lane.url, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            lane.up = True
            self._on_event("server_in", lane.url, f"limit {lane.limit.value}")
        elif isinstance(error, (DeadError, RefusedError, UsageError)) or self.failure is None:
            self.failure = error

    def _nobody(self) -> DeadError:
        names = ", ".join(lane.url for lane in self.lanes)
        return DeadError(
            f"no server was ready for {self._wait_s:.0f} s: {names}",
            fix="start it (forebay up), or add --up; finished rows are kept: the same command continues",
        )


async def _listens(client: Client) -> bool:
    """Whether anything answers at all: a server that is still loading must not be started a second time."""
    try:
        await client.get("/health", timeout_s=5.0)
    except RequestFailure as failure:
        return failure.kind not in ("connect", "broken")
    return True
