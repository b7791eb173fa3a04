"""One rank's process: `python -m forebay.engine.worker.process`, started by the front.

Its standard input carries one line, a WorkerStart as JSON, and then stays open for as long as the front lives: end of
file means that the front is gone, however it went. Heavy imports come after the sockets, so that the front can say
what the worker is doing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from forebay.causes import Cause
from forebay.engine.events import EventLog, bridge_logging
from forebay.engine.ipc.messages import (
    Failed,
    FrontMessage,
    Heartbeat,
    ModelResolved,
    Ready,
    StageReport,
    WorkerStarted,
)
from forebay.engine.ipc.sockets import Inbox, Outbox
from forebay.engine.worker.start import WorkerStart, ignore_stop_signals
from forebay.errors import ExitCode, ForebayError

if TYPE_CHECKING:
    from forebay.engine.distributed.collectives import Comm

__all__ = ["main", "name_process"]

_BEAT_S = 1.0


class _Worker:
    """The process: its sockets, its watching threads and its end."""

    def __init__(self, start: WorkerStart) -> None:
        self.start = start
        self.log = EventLog(start.process.log_format, rank=start.rank)
        bridge_logging(self.log)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.outbox = Outbox(self.context, start.endpoints.to_front)
        # Messages go round among all who connect, so only rank 0 may.
        address = start.endpoints.to_rank0 if start.rank == 0 else "inproc://nobody"
        self.inbox: Inbox[FrontMessage] = Inbox(self.context, address, FrontMessage)
        self.steps_done = 0
        self._last_report: tuple[str, str | None, float] = ("", None, -1.0)
        self._ending = threading.Event()
        threading.Thread(target=self._watch_front, name="front watcher", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self.outbox.send(WorkerStarted(start.rank, os.getpid()))

    def report(self, stage: str, progress: float | None = None, doing: str | None = None) -> None:
        """Tell the front where start-up is; at most every 10 % of one stage."""
        last_stage, last_doing, last = self._last_report
        is_same = (stage, doing) == (last_stage, last_doing)
        if is_same and progress is not None and 0 <= progress - last < 0.1 and (progress < 1.0 or last == 1.0):
            return
        self._last_report = (stage, doing, -1.0 if progress is None else progress)
        self.outbox.send(StageReport(self.start.rank, stage, progress, doing))

    def run(self) -> None:
        """Resolve, load, serve until told to stop."""
        from forebay.engine.model_import.resolve import resolve_model

        start = self.start
        folder, comm_path = start.folder, start.comm_path
        if folder is None:
            folder = str(resolve_model(start.model.model, lambda doing, done: self.report("loading", done, doing)))
            if start.process.tp > 1:
                from forebay.engine.distributed.collectives import shared_buffer

                comm_path = f"/proc/{os.getpid()}/fd/{shared_buffer(start.process.tp)}"
            self.outbox.send(ModelResolved(folder, comm_path))
        self.report("loading", 0.0)
        if start.rank == 0:
            self._lead(Path(folder), comm_path)
        else:
            self._follow(Path(folder), comm_path)

    def _lead(self, folder: Path, comm_path: str | None) -> None:
        """Rank 0: the scheduler, the cache's decisions, this rank's part of every step."""
        from forebay.engine.worker.engine_factory import build_engine, build_rank  # torch comes with it
        from forebay.engine.worker.engine_loop import EngineLoop
        from forebay.engine.worker.tensor_parallel import RankGroup

        start = self.start
        group = RankGroup(self.context, start.endpoints, start.process.tp) if start.process.tp > 1 else None
        rank = build_rank(start, folder, self.report, self.log, self._comm(comm_path))
        engine = build_engine(rank, group, self.report, self.log)
        try:
            die_with_parent()
            self.outbox.send(Ready(start.rank, engine.info))
            EngineLoop(engine, self.inbox, self.outbox, self._count_step).run()
        finally:
            engine.close()
            if group is not None:
                group.end()

    def _follow(self, folder: Path, comm_path: str | None) -> None:
        """A rank above 0: does what rank 0 says."""
        from forebay.engine.worker.engine_factory import build_rank
        from forebay.engine.worker.tensor_parallel import TPFollower

        follower = TPFollower(self.start.rank, self.context, self.start.endpoints)
        try:
            rank = build_rank(self.start, folder, self.report, self.log, self._comm(comm_path))
            die_with_parent()
            self.outbox.send(Ready(self.start.rank, {}))
            follower.run(rank.runner, rank.follow_transfers, self._count_step)
        finally:
            follower.close()

    def _comm(self, path: str | None) -> Comm | None:
        """The other ranks, over rank 0's shared memory; None: there are none."""
        if path is None:
            return None
        from forebay.engine.distributed.collectives import SharedMemoryComm

        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return SharedMemoryComm(self.start.rank, self.start.process.tp, descriptor)
        finally:
            os.close(descriptor)  # the mapping keeps the memory

    def fail(self, error: BaseException) -> int:
        """Report a failure; returns the exit code."""
        if isinstance(error, ForebayError):
            failure = Failed(self.start.rank, error.message, int(error.exit_code), error.fix, error.code)
        else:
            self.log.exception("bug", error)
            cause = Cause.ASSERTION if isinstance(error, AssertionError) else Cause.ENGINE_BUG
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            failure = Failed(self.start.rank, text, int(ExitCode.DEAD), "report it with the log", cause)
        self.outbox.send(failure)
        return failure.exit_code

    def close(self) -> None:
        """Send what is queued and close the sockets."""
        self._ending.set()
        self.inbox.close()
        self.outbox.close()
        self.context.term()

    def _count_step(self, step: int) -> None:
        self.steps_done = step

    def _watch_front(self) -> None:
        """Block until the front's end of our standard input closes; then nothing of us may outlive it."""
        while os.read(0, 4096):
            pass
        self.start.endpoints.remove()
        os._exit(int(ExitCode.DEAD))

    def _beat(self) -> None:
        outbox = Outbox(self.context, self.start.endpoints.to_front)
        while not self._ending.wait(_BEAT_S):
            outbox.send(Heartbeat(self.start.rank, self.steps_done, time.process_time()))
        outbox.close()


def die_with_parent() -> None:
    """Have the kernel kill this process when the front dies, even while a kernel call keeps our watcher from running.

    Called once the socket folder is of no use any more: from here on there is nothing to clean up behind us.
    """
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def name_process(name: str) -> None:
    """What `ps` and `top` show for this process; at most 15 characters."""
    _prctl(15, ctypes.c_char_p(name.encode()))  # PR_SET_NAME


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux
        prctl(option, argument, 0, 0, 0)


def main() -> int:
    """Entry point of the process."""
    ignore_stop_signals()
    start = msgspec.json.decode(_first_line(), type=WorkerStart)
    name_process("forebay::worker")
    worker = _Worker(start)
    try:
        worker.run()
        code = 0
    except Exception as error:  # noqa: BLE001 (the process's border: everything becomes one report and an exit code)
        code = worker.fail(error)
    worker.close()
    return code


def _first_line() -> bytes:
    """The start record, read byte by byte so that nothing beyond it is swallowed by a buffer."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            sys.exit(int(ExitCode.DEAD))
        line += data
    return bytes(line)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # no interpreter teardown: torch's threads have nothing to say any more
