"""The servers of a run: how many requests each gets, which are down, and when they are back."""

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

_HEALTH_CHECK_S = 5.0  # how often the health of a server in use is read
_HEALTH_TIMEOUT_S = 10.0
_MAX_MISSED_CHECKS = 4  # a server with open requests that misses so many health checks in a row is marked down
_COUNTER_S = 0.5  # how often a server's own count of generated tokens is read
_DOWN_CHECK_S = 0.5  # how often a server that is down is asked
_MAX_PREFIX_ROWS = 32  # rows with one prefix that are sent to the same server in a row


class ServerEndpoint:
    """One server. ``up``: work may be sent to it. ``paused_until`` (monotonic seconds) comes from Retry-After."""

    def __init__(self, url: str, client: Client, limit: ConcurrencyLimit) -> None:
        self.url = url
        self.client = client
        self.limit = limit
        self.up = False
        self.paused_until = 0.0
        self.in_flight = 0
        self.queue: deque[WorkItem] = deque()
        self.workers: set[asyncio.Task[None]] = set()

    def has_room(self, now: float) -> bool:
        """Whether one more conversation may start here now."""
        return self.up and now >= self.paused_until and self.in_flight < self.limit.value

    @property
    def over_limit(self) -> bool:
        """Whether a worker should end instead of taking more work."""
        return not self.up or self.in_flight > self.limit.value or time.monotonic() < self.paused_until


class ServerPool:
    """All servers of a run, and the rows that wait for one.

    Args:
        model: the model name to ask for; None takes the one that the first server lists.
        restarter: starts servers that are down; None waits for somebody else to do it.
        wait_s: how long all servers may be down before ``watch`` raises.
        on_event: called when a server goes down or comes up, with (event, url, detail).
    """

    def __init__(
        self,
        servers: list[ServerEndpoint],
        *,
        model: str | None,
        restarter: ServerRestarter | None,
        wait_s: float,
        on_event: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        self.servers = servers
        self.ready: deque[WorkItem] = deque()
        self.errors: Counter[str] = Counter()
        self.identity: ServerIdentity | None = None
        self.failure: BaseException | None = None
        self._model = model
        self._restarter = restarter
        self._wait_s = wait_s
        self._on_event = on_event
        self._recoveries: dict[str, asyncio.Task[None]] = {}

    async def first_ready(self) -> ServerIdentity:
        """Wait until one server is ready; returns what it serves.

        Raises:
            DeadError: none was ready in time.
            UsageError, RefusedError: it serves another model.
        """
        for server in self.servers:
            self._recover(server)
        deadline = time.monotonic() + self._wait_s
        while self.identity is None:
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                raise self._no_server()
            await asyncio.sleep(0.02)
        return self.identity

    def mark_down(self, server: ServerEndpoint, reason: str) -> None:
        """Send nothing more to a server, take its waiting rows back, and wait for it to be ready again."""
        server.up = False
        self.ready.extendleft(reversed(server.queue))
        server.queue.clear()
        if server.url not in self._recoveries:
            self._on_event("server_down", server.url, reason)
            self._recover(server)

    def next_work(self, server: ServerEndpoint) -> WorkItem | None:
        """The next row for a server. Rows with one prefix go to one server; an idle server takes from the longest
        queue.
        """
        if server.queue:
            return server.queue.popleft()
        if self.ready:
            first = self.ready.popleft()
            if len(self.servers) > 1:
                self._claim_same_prefix(server, first)
            return first
        longest = max(self.servers, key=lambda other: len(other.queue))
        return longest.queue.pop() if longest.queue else None

    def _claim_same_prefix(self, server: ServerEndpoint, first: WorkItem) -> None:
        most = min(_MAX_PREFIX_ROWS, max(1, server.limit.value // 2))
        start = first.row.prefix[0]
        while self.ready and len(server.queue) < most and self.ready[0].row.prefix[0] == start:
            server.queue.append(self.ready.popleft())

    @property
    def waiting(self) -> int:
        """Rows that no worker has taken yet."""
        return len(self.ready) + sum(len(server.queue) for server in self.servers)

    async def watch(self) -> None:
        """Until cancelled: check the health of servers in use, and raise when all were down for too long.

        Raises:
            DeadError: no server is ready.
        """
        missed: Counter[str] = Counter()
        down_since: float | None = None
        while True:
            await asyncio.sleep(_HEALTH_CHECK_S if any(server.up for server in self.servers) else _DOWN_CHECK_S)
            if self.failure is not None:
                raise self.failure
            if any(server.up for server in self.servers):
                down_since = None
            else:
                down_since = down_since or time.monotonic()
                if time.monotonic() - down_since > self._wait_s:
                    raise self._no_server()
            for server in self.servers:
                if server.up and server.in_flight and not await is_ready(server.client, timeout_s=_HEALTH_TIMEOUT_S):
                    missed[server.url] += 1
                    if missed[server.url] >= _MAX_MISSED_CHECKS:
                        self._cancel_requests(server)
                else:
                    missed[server.url] = 0

    async def read_counters(self) -> None:
        """Until cancelled: tell each server's limit how many tokens the server has generated, where the server counts
        them.
        """
        kind = self.identity.kind if self.identity is not None else "unknown"
        while True:
            await asyncio.sleep(_COUNTER_S)
            for server in self.servers:
                if server.up and (generated := await read_generated(server.client, kind)) is not None:
                    full = server.in_flight >= server.limit.value
                    server.limit.counted(generated, time.monotonic(), full=full)

    async def close(self) -> None:
        """Stop waiting for servers, and close all connections."""
        for task in list(self._recoveries.values()):
            task.cancel()
        await asyncio.gather(*self._recoveries.values(), return_exceptions=True)
        for server in self.servers:
            await server.client.close()

    def _cancel_requests(self, server: ServerEndpoint) -> None:
        self.mark_down(server, f"no answer to {_MAX_MISSED_CHECKS} health checks in a row")
        for worker in list(server.workers):
            worker.cancel()

    def _recover(self, server: ServerEndpoint) -> None:
        task = asyncio.create_task(self._wait_until_ready(server))
        self._recoveries[server.url] = task
        task.add_done_callback(lambda done: self._recovered(server, done))

    async def _wait_until_ready(self, server: ServerEndpoint) -> None:
        if self._restarter is not None and not await is_ready(server.client):
            await self._restarter.start()
        while True:
            if await is_ready(server.client) and await self._check_identity(server):
                return
            await asyncio.sleep(_DOWN_CHECK_S)
            if self._restarter is not None and not await _accepts_connections(server.client):
                await self._restarter.start()

    async def _check_identity(self, server: ServerEndpoint) -> bool:
        """Check that a server that is ready serves what the other servers serve; False when it does not answer.

        Raises:
            RefusedError: it serves something else.
        """
        try:
            identity = await identify(server.client, model=self._model)
        except RequestFailure:
            return False
        if self.identity is None:
            self.identity = identity
        elif identity != self.identity:
            raise RefusedError(
                f"{server.url} does not serve what the run began with: {identity} instead of {self.identity}",
                fix="leave that server out, or start it with the same model and settings",
            )
        return True

    def _recovered(self, server: ServerEndpoint, done: asyncio.Task[None]) -> None:
        self._recoveries.pop(server.url, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            server.up = True
            self._on_event("server_up", server.url, f"limit {server.limit.value}")
        elif isinstance(error, (DeadError, RefusedError, UsageError)) or self.failure is None:
            self.failure = error

    def _no_server(self) -> DeadError:
        names = ", ".join(server.url for server in self.servers)
        return DeadError(
            f"no server was ready for {self._wait_s:.0f} s: {names}",
            fix="start it (forebay up), or add --up; finished rows are kept: the same command continues",
        )


async def _accepts_connections(client: Client) -> bool:
    """Whether anything accepts connections: a server that is still loading must not be started a second time."""
    try:
        await client.get("/health", timeout_s=5.0)
    except RequestFailure as failure:
        return failure.kind not in ("connect", "broken")
    return True
