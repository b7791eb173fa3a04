"""The main program of the helper on another host.

    python helper.pyz agent                    a request on stdin, events and the result on stdout, as JSON lines
    python helper.pyz supervisor FOLDER ...    the supervisor of a run

Client to helper: the request, then ``{"beat": 1}`` every few seconds and ``{"interrupt": 1}`` for Ctrl-C. Helper to
client: ``event``, ``say``, ``beat``, and at the end ``result`` or ``error``. A client that is silent for 30 s, or whose
connection ends, is gone: the helper leaves, and whatever was launched goes on under its supervisor. ``down`` is carried
out to its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from forebay.commands.handlers import run_request
from forebay.commands.relay import serve_relay
from forebay.commands.requests import RelayRequest, decode_request
from forebay.errors import ForebayError
from forebay.machine.local import LocalMachine
from forebay.runs.run_record import Run, all_runs

__all__ = ["main"]

_BEAT_S = 5.0
_SILENT_S = 30.0
_FLUSH_S = 5.0


class ClientLink:
    """The connection to the client: an ``Output`` whose writes never block, and a watch over the client's life.

    Args:
        stay: go on when the client is gone (``down``).
    """

    def __init__(self, stdin: BinaryIO, stdout: int, *, stay: bool) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._stay = stay
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._heard_at = time.monotonic()
        self._may_exit = threading.Lock()
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None:
        self.send({"event": event, "offset": offset})

    def say(self, text: str) -> None:
        self.send({"say": text})

    def send(self, message: Mapping[str, Any]) -> None:
        """One line to the client."""
        self._outgoing.put(json.dumps(message).encode() + b"\n")

    @contextlib.contextmanager
    def launching(self) -> Iterator[bool]:
        """Whether the client is still there; inside, its loss does not end this process half way through a launch."""
        with self._may_exit:
            yield time.monotonic() - self._heard_at < _SILENT_S

    def close(self) -> None:
        """Wait until all lines are written."""
        self._outgoing.put(None)
        self._writer.join(_FLUSH_S)

    def _listen(self) -> None:
        while line := self._stdin.readline():
            self._heard_at = time.monotonic()
            if b"interrupt" in line:
                self._stay = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self._gone()

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            self.send({"beat": 1})
            if time.monotonic() - self._heard_at > _SILENT_S:
                self._gone()

    def _gone(self) -> None:
        if self._stay:
            return
        with self._may_exit:
            os._exit(0)

    def _write_all(self) -> None:
        while (data := self._outgoing.get()) is not None:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._stdout, view) :]
                except OSError:
                    self._gone()
                    return


def main(argv: list[str]) -> None:
    """Entry point of the file that is sent to a host."""
    if argv[:1] == ["supervisor"]:
        from forebay.operation.start.supervisor import main as supervise

        supervise(argv[1], argv[2:])
        return
    stdin, stdout = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # whatever prints must not end up among the answers
    _take_environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with _helper_in_use():
        with contextlib.suppress(KeyboardInterrupt):
            _serve(stdin, stdout)
    os._exit(0)


@contextlib.contextmanager
def _helper_in_use() -> Iterator[None]:
    """Remove the helper's file afterwards, unless another helper uses it or a run is up."""
    path = Path(sys.argv[0])
    with path.open("rb") as own:
        fcntl.flock(own, fcntl.LOCK_SH)
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.suffix == ".pyz" and not any(_is_up(run) for run in all_runs()):
                path.unlink()
                path.parent.rmdir()


def _is_up(run: Run) -> bool:
    try:
        return not run.read().ended
    except ForebayError:
        return False


def _serve(stdin: BinaryIO, stdout: int) -> None:
    line = stdin.readline()
    if not line:
        return  # the client went before it asked for anything
    fields = json.loads(line)
    os.environ.update(fields.pop("env", {}))
    if fields.get("do") == "relay":
        serve_relay(RelayRequest(fields["host"], fields["port"]), stdin, stdout)
        return
    link = ClientLink(stdin, stdout, stay=fields.get("do") == "down")
    try:
        request = decode_request(fields)
        link.send({"result": run_request(LocalMachine(), request, link, launching=link.launching)})
    except ForebayError as error:
        link.send({"error": _error(error.message, error.fix, error.code, int(error.exit_code))})
    except Exception as error:
        link.send({"error": _error(f"internal error on the host, {type(error).__name__}: {error}", None, None, 1)})
        raise
    finally:
        link.close()


def _error(message: str, fix: str | None, code: str | None, exit_code: int) -> dict[str, Any]:
    return {"message": message, "fix": fix, "code": code, "exit_code": exit_code}


def _take_environment() -> None:
    """The user's own umask, which the shell passes on; servers make files that others may be meant to read."""
    mask = os.environ.pop("FOREBAY_UMASK", "")
    if mask and all(digit in "01234567" for digit in mask):
        os.umask(int(mask, 8))
    os.chdir(Path.home() if Path.home().is_dir() else "/")
