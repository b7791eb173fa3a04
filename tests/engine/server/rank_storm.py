"""A life of a server of several ranks under random misfortune, and what must hold all the while.

The model behind it is small: the tokens of each prompt are known from its first answer (on any life, as long as the
number of ranks is the same), every answer must repeat them, and a life ends either because we killed a rank, because we
stopped one for good, or because we asked it to. Anything else is a failure.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_process import Answer, ServerProcess, is_alive

RANK_TIMEOUT_S = 2.0
DEATH_S = 2.0
PROMPTS = [[10 + (p * 37 + 11 * i) % 480 for i in range(n)] for p, n in enumerate((5, 40, 97, 130))]


class Storm:
    """One server's life.

    Args:
        model: a folder whose heads divide.
        tp: number of ranks.
        rng: where misfortune comes from.
        folder: for the log and the disk tier, which outlives the life.
        known: prompt number -> its tokens, over all lives at this number of ranks.
    """

    def __init__(self, model: Path, tp: int, rng: random.Random, folder: Path, known: dict[int, list[int]]) -> None:
        self.tp, self.rng, self.known = tp, rng, known
        self.did: list[str] = []
        self.server = ServerProcess(
            str(model), folder / f"{rng.random()}.log", "--served-model-name", "smollm2", "--tp", str(tp),
            "--host-cache", "4MB", "--disk-cache", str(folder / "disk"), "--disk-size", "20MB", "--load", "always",
            "--rank-timeout", str(RANK_TIMEOUT_S), "--threads", "2",
        )  # fmt: skip
        self.pids = [int(self.server.wait_for(rf"INFO worker rank={rank} pid=(\d+)")[1]) for rank in range(tp)]

    # What happens

    def weather(self, count: int) -> None:
        """``count`` random events after which the server must be as good as before."""
        events: list[Callable[[], None]] = [
            self.ask, self.ask_several, self.forget, self.ask_with_a_slow_rank, self.load_with_a_slow_rank, self.limp,
        ]  # fmt: skip
        for _ in range(count):
            event = self.rng.choice(events)
            self.did.append(event.__name__)
            event()
            assert self.server.process.poll() is None, self.story()

    def ask(self, number: int | None = None) -> None:
        """A prompt: the tokens are those it always had."""
        number = self.rng.randrange(len(PROMPTS)) if number is None else number
        body = {"model": "smollm2", "prompt": PROMPTS[number], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = self.server.post("/v1/completions", {**body, "return_token_ids": True})
        assert answer.status == 200, f"{answer.text}\n{self.story()}"
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        assert tokens == self.known.setdefault(number, tokens), f"prompt {number}: {self.story()}"

    def ask_several(self) -> None:
        """All prompts at once."""
        errors: list[BaseException] = []

        def one(number: int) -> None:
            try:
                self.ask(number)
            except BaseException as error:  # noqa: BLE001 (raised again by the caller)
                errors.append(error)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """Drop what a tier holds."""
        tier = self.rng.choice(["device", "device", "host"])
        self.did.append(tier)
        assert self.server.post(f"/flush_cache?tier={tier}").status == 200

    def ask_with_a_slow_rank(self) -> None:
        with self.pausing(self.any_rank(), self.rng.uniform(0.05, 0.6)):
            self.ask()

    def load_with_a_slow_rank(self) -> None:
        """A prompt comes from the host tier or the disk, on a rank that is late with its part."""
        number = self.rng.randrange(1, len(PROMPTS))
        self.ask(number)
        self.server.post("/flush_cache?tier=device")
        if self.rng.random() < 0.5:
            self.server.post("/flush_cache?tier=host")
        with self.pausing(self.pids[-1], self.rng.uniform(0.1, 0.6)):
            self.ask(number)

    def limp(self) -> None:
        """A rank gets a tenth of its time for longer than --rank-timeout: slow, and not to be taken for hung."""
        pid, until = self.any_rank(), time.monotonic() + 1.5 * RANK_TIMEOUT_S
        while time.monotonic() < until:
            with self.pausing(pid, 0.09):
                pass
            time.sleep(0.01)
        self.ask()

    def any_rank(self) -> int:
        return self.rng.choice(self.pids)

    @contextmanager
    def pausing(self, pid: int, seconds: float) -> Any:
        """Stop a rank now, and let it go on after ``seconds``, whatever the body does meanwhile."""
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
        timer.start()
        try:
            yield
        finally:
            timer.join()

    # How it ends

    def end_by_kill(self) -> None:
        """A rank is killed, with a request under way or without; at once the server ends, naming it."""
        rank = self.rng.randrange(self.tp)
        answers: list[Answer] = []
        thread = self.long_request(answers) if self.rng.random() < 0.7 else None
        self.did.append(f"kill {rank} {'busy' if thread else 'idle'}")
        began = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        assert self.server.process.wait(30) == 4, self.story()
        took = time.monotonic() - began
        assert took < DEATH_S, f"it took {took:.1f} s: {self.story()}"
        self.assert_named(f"rank {rank} was killed by SIGKILL", "code=worker_killed")
        if thread is not None:
            thread.join()
            assert [a.status for a in answers] in ([500], []), self.story()

    def end_by_hang(self) -> None:
        """A rank is stopped for good: hung after --rank-timeout, and named,
        though the others wait for it with a CPU each.
        """
        rank = self.rng.randrange(self.tp)
        self.did.append(f"stop {rank}")
        thread = self.long_request([])
        os.kill(self.pids[rank], signal.SIGSTOP)
        began = time.monotonic()
        assert self.server.process.wait(30) == 6, self.story()
        assert time.monotonic() - began > RANK_TIMEOUT_S - 1.5, "a rank beats once a second: this was too soon"
        self.assert_named(f"rank {rank} has sent no heartbeat", "code=engine_hung")
        thread.join()

    def end_in_order(self) -> None:
        assert self.server.end() == 0, self.story()
        assert " ERROR " not in self.server.text()
        assert not any(map(is_alive, self.pids)), self.story()

    def assert_named(self, *words: str) -> None:
        """One error line with these words, and no process of the server left."""
        errors = [line for line in self.server.text().splitlines() if " ERROR " in line]
        assert len(errors) == 1, self.story()
        assert all(word in errors[0] for word in words), f"{errors[0]}\n{self.story()}"
        assert not any(map(is_alive, self.pids)), self.story()

    def long_request(self, answers: list[Answer]) -> threading.Thread:
        """A request that is still running when this returns."""
        body = {"model": "smollm2", "prompt": PROMPTS[1], "max_tokens": 400, "temperature": 0, "ignore_eos": True}

        def ask() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # the server may go before it can answer
                answers.append(self.server.post("/v1/completions", body))

        thread = threading.Thread(target=ask)
        thread.start()
        self.server.wait_until(
            lambda: self.server.metric("forebay_requests", state="running") >= 1, "a running request"
        )
        return thread

    def close(self) -> None:
        """Leave nothing, whatever happened."""
        for pid in self.pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)
        self.server.kill()

    def story(self) -> str:
        log = re.sub(r"(?m)^.* INFO stage .*\n", "", self.server.text())
        return f"{self.tp} ranks: {', '.join(self.did)}\n{log[-2000:]}"
