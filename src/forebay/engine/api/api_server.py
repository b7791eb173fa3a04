"""The API server's process: serves the open port, starts the ranks, and ends everything together."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import time
from collections.abc import Coroutine
from pathlib import Path

import uvloop

from forebay.causes import Cause
from forebay.engine.api.app import build_app
from forebay.engine.api.engine_client import EngineClient
from forebay.engine.api.errors import ApiError, unavailable
from forebay.engine.api.http.limits import raise_open_files
from forebay.engine.api.http.server import HttpServer
from forebay.engine.api.server_state import Phase, ServerState
from forebay.engine.api.service import ModelTextAssets, Service
from forebay.engine.api.worker_processes import WorkerGroup, describe_exit
from forebay.engine.config import EngineConfig
from forebay.engine.events import EventLog, bridge_logging
from forebay.engine.ipc.messages import (
    Failed,
    Heartbeat,
    ModelResolved,
    Ready,
    StageReport,
    StepReport,
    WorkerMessage,
    WorkerStarted,
)
from forebay.engine.ipc.sockets import Endpoints
from forebay.errors import ExitCode, ForebayError

__all__ = ["run_server"]

_TICK_S = 1.0
_END_GRACE_S = 5.0
_LAST_WORDS_S = 1.0
"""A process's last message may arrive after its end is noticed."""


class ApiServer:
    """One server's life, from the first message of a rank to the exit code.

    Args:
        config: what was asked for.
        listener: a listening socket.
        engine: bound already.
        workers: rank 0 is running already.
        endpoints: the sockets' folder.
        log: events.
        started_at: when the process began, seconds since the epoch.
    """

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        engine: EngineClient,
        workers: WorkerGroup,
        endpoints: Endpoints,
        log: EventLog,
        started_at: float,
    ) -> None:
        self._config = config
        self._listener = listener
        self._workers = workers
        self._endpoints = endpoints
        self._log = log
        self._state = ServerState(started_at)
        self._engine = engine
        self._service = Service(config, self._state, engine)
        self._http = HttpServer(build_app(self._service), self._service.connection_limits, self._on_signal)
        self._ready_ranks: set[int] = set()
        self._end: asyncio.Future[int] | None = None
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until the end; returns the exit code."""
        self._end = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(self._http.serve([self._listener]))
        host, port = self._listener.getsockname()[:2]
        self._log.info("listening", host=host, port=port, model=self._config.served_name)
        self._background(self._engine.receive(self._on_message))
        self._background(self._watch_for_hung_ranks())
        self._watch_workers()
        exit_code = await self._end
        await self._shut_down(exit_code)
        self._http.should_exit = True
        await serving
        self._log.info("ended", exit=exit_code)
        return exit_code

    def _watch_workers(self) -> None:
        """Have ``_on_exit`` called at the end of every process started so far."""
        loop = asyncio.get_running_loop()

        def on_exit(rank: int, returncode: int) -> None:
            loop.call_soon_threadsafe(self._on_exit, rank, returncode)

        self._workers.watch(on_exit)

    def _finish(self, code: int) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(int(code))

    def _on_signal(self, number: signal.Signals) -> None:
        """Drain and end; a second signal, or one before the server is ready, ends it without waiting."""
        if self._state.phase is Phase.DRAINING or not self._state.is_ready:
            self._hurry.set()
        self._log.info("stopping", signal=number.name, live=self._service.num_requests)
        self._finish(ExitCode.INTERRUPTED if number is signal.SIGINT else ExitCode.DONE)

    async def _watch_for_hung_ranks(self) -> None:
        while True:
            hung = self._workers.hung_rank()
            if hung is not None:
                timeout = self._config.process.rank_timeout_s
                self._die(
                    f"rank {hung} has sent no heartbeat and used no CPU for {timeout:g} s",
                    hung,
                    ExitCode.STALLED,
                    Cause.ENGINE_HUNG,
                )
            await asyncio.sleep(_TICK_S)

    # -- messages of the ranks ----------------------------------------------------------------------------------

    def _on_message(self, message: WorkerMessage) -> None:
        match message:
            case StepReport():
                self._service.on_step(message)
            case Heartbeat():
                self._workers.beat(message.rank, message.cpu_s)
            case WorkerStarted():
                self._log.info("worker", rank=message.rank, pid=message.pid)
            case StageReport():
                self._on_stage(message)
            case ModelResolved():
                self._on_resolved(message.folder, message.comm_path)
            case Ready():
                self._on_ready(message)
            case Failed():
                self._die(message.message, message.rank, message.exit_code, message.code, message.fix)

    def _on_stage(self, message: StageReport) -> None:
        if message.rank == 0:
            self._state.reach(message.stage, message.progress)
        progress = None if message.progress is None else round(message.progress, 3)
        self._log.info("stage", rank=message.rank, name=message.stage, progress=progress, doing=message.doing)

    def _on_resolved(self, folder: str, comm_path: str | None) -> None:
        for rank in range(1, self._config.process.tp):
            self._workers.spawn(rank, folder, comm_path)
        self._watch_workers()
        self._background(self._read_text(Path(folder)))

    async def _read_text(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self._service.text = await loop.run_in_executor(self._service.threads, ModelTextAssets, folder)
        await self._open_if_complete()

    def _on_ready(self, message: Ready) -> None:
        self._ready_ranks.add(message.rank)
        if message.rank == 0:
            self._service.info = message.info
        self._background(self._open_if_complete())

    async def _open_if_complete(self) -> None:
        """When every rank and the tokenizer are there: generate one token, then say ready."""
        complete = len(self._ready_ranks) == self._config.process.tp and self._service.text is not None
        if not complete or self._state.stage == "serving" or self._state.phase is not Phase.STARTING:
            return
        self._state.reach("serving", None)
        self._log.info("stage", name="serving")
        assert self._service.text is not None
        outside = self._service.text.drop_end_tokens_beyond(self._service.limits.vocab_size)
        if outside:
            self._log.warning(
                "end_tokens", ignored=",".join(map(str, outside)), reason="the model has no logits for them"
            )
        await self._service.probe()
        self._endpoints.remove()
        self._state.ready()
        gc.collect()
        gc.freeze()
        seconds = round(time.time() - self._state.started_at, 3)
        pools = self._service.info.get("pools", {})
        self._log.info(
            "ready",
            seconds=seconds,
            model=self._config.served_name,
            context_length=self._service.info["context_length"],
            device_pool_tokens=pools.get("device_pool_tokens"),
            host_pool_tokens=pools.get("host_pool_tokens"),
        )

    def _background(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine whose failure is the server's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_background_end)

    def _on_background_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ForebayError):
            self._die(error.message, None, error.exit_code, error.code, error.fix)
        elif error is not None and not isinstance(error, ApiError):
            self._log.exception("bug", error)
            self._die(f"{type(error).__name__}: {error}", None, ExitCode.BUG, Cause.ENGINE_BUG)

    # -- the end --------------------------------------------------------------------------------------------------

    def _on_exit(self, rank: int, returncode: int) -> None:
        """A process ended. Where it ended by itself it has said why, and that may still be on its way."""
        reason = f"the process of rank {rank} {describe_exit(returncode)}"

        def conclude() -> None:
            self._die(reason, rank, ExitCode.DEAD, Cause.WORKER_KILLED)

        if self._end is None or self._end.done():
            return
        if returncode < 0:
            conclude()
        else:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, conclude)

    def _die(
        self, reason: str, rank: int | None, exit_code: int, code: str | None = None, fix: str | None = None
    ) -> None:
        """End the server because a part of it failed: one line says why, the first failure wins."""
        if self._end is None or self._end.done():
            return  # an earlier failure, or an end that was asked for
        self._state.phase = Phase.DEAD
        self._log.error("died", rank=rank, code=str(code or Cause.UNKNOWN), reason=reason, fix=fix, exit=int(exit_code))
        self._hurry.set()
        self._finish(exit_code)

    async def _shut_down(self, code: int) -> None:
        """Drain (unless in a hurry), answer what is left with an error, end the ranks."""
        was_dead = self._state.phase is Phase.DEAD
        if was_dead:
            self._service.close(ApiError("The server's engine died.", status=500, code="engine_dead"))
        else:
            self._state.phase = Phase.DRAINING
            await self._drain()
            self._service.close(unavailable(self._state.refusal(), "shutting_down"))
        self._engine.stop()
        grace_s = 0.0 if was_dead or self._hurry.is_set() else _END_GRACE_S
        await asyncio.get_running_loop().run_in_executor(None, self._workers.end, grace_s)
        for task in self._tasks:
            task.cancel()
        self._engine.close()
        self._endpoints.remove()
        self._service.threads.shutdown(wait=False, cancel_futures=True)

    async def _drain(self) -> None:
        """Until every request has its answer, --drain-seconds have passed, or a second signal came."""
        waits = [asyncio.create_task(self._service.wait_until_idle()), asyncio.create_task(self._hurry.wait())]
        await asyncio.wait(waits, timeout=self._config.process.drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def run_server(
    config: EngineConfig,
    listener: socket.socket,
    engine: EngineClient,
    workers: WorkerGroup,
    endpoints: Endpoints,
    log: EventLog,
    started_at: float,
) -> int:
    """Serve on ``listener`` until a signal or a failure; returns the exit code.

    The caller has bound the sockets and started rank 0, so that the port is open and weights are on their way while
    this module's imports run.
    """
    bridge_logging(log)
    raise_open_files()

    async def serve() -> int:
        return await ApiServer(config, listener, engine, workers, endpoints, log, started_at).run()

    exit_code: int = uvloop.run(serve())
    return exit_code
