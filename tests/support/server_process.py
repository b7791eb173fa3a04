"""A real `forebay serve` as a child process, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 120


@dataclass
class Answer:
    """An HTTP answer, whatever its status."""

    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def ask(url: str, body: Any = None, *, method: str = "GET", timeout_s: float = 60, **headers: str) -> Answer:
    """One request; ``body`` is sent as JSON, bytes as they are."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read().decode())


class ServerProcess:
    """Starts the server on a free port and waits until it is ready (unless told not to)."""

    def __init__(
        self,
        model: str,
        log: Path,
        *options: str,
        wait: bool = True,
        tmp: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        self.model_name = (
            options[options.index("--served-model-name") + 1] if "--served-model-name" in options else model
        )
        command = [sys.executable, "-m", "forebay.engine", model, "--port", "0", "--device-cache", "64MB", *options]
        environment = (environment or dict(os.environ)) | ({} if tmp is None else {"TMPDIR": str(tmp)})
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        port = self.wait_for(r"INFO listening .*port=(\d+)")[1]
        self.url = f"http://127.0.0.1:{port}"
        if wait:
            self.wait_ready()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            found = re.search(pattern, self.text())
            if found:
                return found
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the log never said {pattern!r}:\n{self.text()}")
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait_for(r"INFO ready ")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def worker_pid(self) -> int:
        return int(self.wait_for(r"INFO worker rank=0 pid=(\d+)")[1])

    def get(self, path: str, **headers: str) -> Answer:
        return ask(self.url + path, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return ask(self.url + path, b"" if body is None else body, method="POST", **headers)

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"model": "smollm2", "prompt": prompt, **options})
        assert answer.status == 200, answer.text
        data: dict[str, Any] = answer.json()
        return data

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that carry ``labels``."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items()):
                total += float(value)
        return total

    def wait_until(self, condition: Any, what: str, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{self.text()}"
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def is_alive(pid: int) -> bool:
    """Running, not a zombie whose parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_behind(private_tmp: Path) -> list[str]:
    """What a server whose TMPDIR was ``private_tmp`` has left there, and named shared memory of any server.

    ``forebay-test-*`` are files of tests that run beside this one.
    """
    named = [path for path in Path("/dev/shm").glob("*forebay*") if not path.name.startswith("forebay-test-")]
    return [str(path) for path in [*private_tmp.glob("forebay-ipc-*"), *named]]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
