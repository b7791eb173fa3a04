"""Processes and data that several workload tests share."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from ports import free_port

from benchmarks.lib.modules import module_command, module_env

ROOT = Path(__file__).resolve().parents[2]


class NullServer:
    """``benchmarks.null_server`` as a process; ``restart`` brings it back on the same port."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._port = 0
        self._process = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stats(self) -> dict[str, int]:
        with urlopen(f"{self.url}/null/stats") as answer:
            counts: dict[str, int] = json.load(answer)
        return counts

    def restart(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = module_command("null_server", "--port", str(self._port), *self._options)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=module_env())
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("null server on "), line
        self._port = int(line.rsplit(" ", 1)[1])
        return process


class EngineServer:
    """The embedded server on a model folder, in a session of its own; ``restart`` brings it back on the same port."""

    def __init__(self, model: Path) -> None:
        self._port = free_port()
        self._model = model
        self._log = (model / "server.log").open("ab")
        self.restart()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """SIGKILL to the front; its workers must go by themselves, or the port would stay taken."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        command = [sys.executable, "-m", "forebay.engine", str(self._model), "--port", str(self._port)]
        command += ["--device-cache", "32MB", "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)


def forebay(*arguments: str) -> subprocess.Popen[str]:
    """The command, as a process with its output captured."""
    return subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a process that ends by itself."""
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def write_conversations(path: Path, count: int, *, seed: int = 0) -> None:
    """Conversations of 1 to 4 turns in both dialects; some share a system prompt, some are equal,
    some are malformed.
    """
    chosen = random.Random(seed)
    with path.open("w", encoding="utf-8") as out:
        for number in range(count):
            if number % 50 == 49:
                out.write('{"messages": [{"role": "user", "content": ""}]}\n')
                continue
            words = " ".join(chosen.choices(["why", "how", "when", "é", "水"], k=chosen.randint(1, 9)))
            who, said = (("from", "value"), ("role", "content"))[number % 2]
            names = {"from": ("system", "human", "gpt"), "role": ("system", "user", "assistant")}[who]
            turns = [{who: names[0], said: f"You answer briefly. {number % 3}"}]
            for turn in range(chosen.randint(1, 4)):
                turns += [{who: names[1], said: f"{turn}: {words}?"}, {who: names[2], said: "an old answer"}]
            row = {"conversations": turns} if number % 5 else {"id": f"row {number}", "conversations": turns}
            line = json.dumps(row, ensure_ascii=False) + "\n"
            out.write(line * (2 if number % 20 == 7 else 1))
