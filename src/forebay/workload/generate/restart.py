"""``--up``: start the server with ``forebay up``, and again when it dies, at most 5 times in 10 minutes."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence

from forebay.errors import DeadError
from forebay.workload.target import split_command

__all__ = ["ServerRestarter", "StartBudget", "up_command"]


def up_command(what: str, *more: str) -> list[str]:
    """The command ``forebay up WHAT --detach``, run with this interpreter. ``what`` may hold further options."""
    return [sys.executable, "-m", "forebay.cli", "up", "--detach", "--no-verify", *more, *split_command(what)]


class StartBudget:
    """When the next start may happen: 2, 4, 8 ... s apart, at most ``starts`` in ``window_s``. Times are passed in."""

    def __init__(self, *, starts: int = 5, window_s: float = 600.0, first_delay_s: float = 2.0) -> None:
        self.starts = starts
        self.window_s = window_s
        self._first_delay_s = first_delay_s
        self._at: deque[float] = deque()

    def delay(self, now: float) -> float | None:
        """Seconds to wait before the next start; None when the budget is spent."""
        while self._at and now - self._at[0] >= self.window_s:
            self._at.popleft()
        if len(self._at) >= self.starts:
            return None
        if not self._at:
            return 0.0
        back_off_s = self._first_delay_s * float(2 ** (len(self._at) - 1))
        return max(0.0, self._at[-1] + back_off_s - now)

    def started(self, now: float) -> None:
        """Note a start."""
        self._at.append(now)


class ServerRestarter:
    """Runs the start command; several calls at once start the server once.

    Args:
        command: starts the server and exits with 0 once it is up (``forebay up`` does).
    """

    def __init__(self, command: Sequence[str], budget: StartBudget | None = None) -> None:
        self._command = list(command)
        self._budget = budget or StartBudget()
        self._lock = asyncio.Lock()
        self.count = 0

    async def start(self) -> None:
        """Start the server, after the back-off. A start that fails is not an error while more starts are allowed.

        Raises:
            DeadError: too many starts.
        """
        async with self._lock:
            loop = asyncio.get_running_loop()
            delay = self._budget.delay(loop.time())
            if delay is None:
                raise DeadError(
                    f"the server was started {self._budget.starts} times in {self._budget.window_s / 60:.0f} min "
                    "and died each time",
                    fix="forebay doctor; finished rows are kept: the same command continues",
                )
            await asyncio.sleep(delay)
            self._budget.started(loop.time())
            self.count += 1
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            await process.wait()
