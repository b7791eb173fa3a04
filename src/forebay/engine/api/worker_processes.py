"""The rank processes: started, watched and ended by the front."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from forebay.engine.config import EngineConfig
from forebay.engine.ipc.sockets import Endpoints
from forebay.engine.worker.start import STOP_SIGNALS, WorkerStart

__all__ = ["WorkerGroup", "describe_exit"]


class WorkerGroup:
    """One process a rank. Each holds the read end of a pipe whose write end only we have: our death closes it.

    Args:
        config: what was asked for.
        endpoints: the sockets' folder.
        available_bytes: memory that can be allocated on this machine; None: not known.
    """

    def __init__(self, config: EngineConfig, endpoints: Endpoints, available_bytes: int | None) -> None:
        self._config = config
        self._endpoints = endpoints
        self._available_bytes = available_bytes
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watched: set[int] = set()
        self._beats: dict[int, tuple[float, float]] = {}
        """Rank -> when it last showed life, and its CPU seconds then."""

    @property
    def ranks(self) -> list[int]:
        return list(self._processes)

    def spawn(self, rank: int, folder: str | None = None, comm_path: str | None = None) -> None:
        """Start a rank. It shares the session and process group of this process and ignores SIGINT and SIGTERM: the API
        server tells it when to end.

        Both signals are blocked while the process is started, so the worker begins with them blocked and cannot die of
        one before it ignores them. A signal that arrives meanwhile stays pending and is handled afterwards.
        """
        start = WorkerStart(
            rank=rank,
            endpoints=self._endpoints,
            model=self._config.model,
            cache=self._config.cache,
            scheduler=self._config.scheduler,
            process=self._config.process,
            available_bytes=self._available_bytes,
            folder=folder,
            comm_path=comm_path,
        )
        command = [sys.executable, "-m", "forebay.engine.worker.process"]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
        self._processes[rank] = process
        self._beats[rank] = (time.monotonic(), 0.0)

    def watch(self, on_exit: Callable[[int, int], None]) -> None:
        """Call ``on_exit(rank, returncode)`` from a thread when a process ends."""
        for rank, process in self._processes.items():
            if rank not in self._watched:
                self._watched.add(rank)
                threading.Thread(target=lambda r, p: on_exit(r, p.wait()), args=(rank, process), daemon=True).start()

    def beat(self, rank: int, cpu_s: float) -> None:
        """A heartbeat came."""
        self._beats[rank] = (time.monotonic(), cpu_s)

    def hung_rank(self) -> int | None:
        """A rank that neither beats nor uses CPU for --rank-timeout; a slow one uses CPU and is never meant."""
        now = time.monotonic()
        for rank, process in self._processes.items():
            since, cpu_s = self._beats[rank]
            if now - since < self._config.process.rank_timeout_s or process.poll() is not None:
                continue
            used_s = _cpu_seconds(process.pid)
            if used_s is None or used_s <= cpu_s + 0.01:
                return rank
            self._beats[rank] = (now, used_s)
        return None

    def end(self, grace_s: float) -> None:
        """Wait for the processes to end by themselves, then kill; always reaps."""
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


def describe_exit(returncode: int) -> str:
    """A process's end in words."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _cpu_seconds(pid: int) -> float | None:
    """CPU time of another process by its clock id (clock_getcpuclockid(3): ``~pid << 3 | 2``); None when it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None
