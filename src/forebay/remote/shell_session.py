"""One POSIX shell kept open at a destination: many reads go there as one script and come back as one answer.

What a login prints before the shell starts (a banner, an rc file) is skipped up to the session's mark. The login shell
may be any: it only ever sees ``exec sh``, and everything else goes to that ``sh`` over its stdin."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import subprocess
import threading
import time

from forebay.errors import HostUnreachableError
from forebay.remote.shell_scripts import PRELUDE, ShellAnswer, parse_answers
from forebay.remote.transport import Transport

__all__ = ["ShellSession"]

_HELLO_S = 20.0
_READ_S = 30.0
_BANNER_BYTES = 1 << 20


class ShellSession:
    """A shell at the destination. Made again by itself after the connection was lost; safe to use from several threads.

    Attributes:
        round_trips: how many scripts have been answered so far.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = b""
        self._lock = threading.Lock()
        self.round_trips = 0

    @property
    def name(self) -> str:
        """The destination as the user wrote it."""
        return self._transport.name

    def run(self, lines: list[str], *, timeout_s: float = _READ_S) -> list[ShellAnswer]:
        """Run ``lines`` (each one a function of ``PRELUDE``) in one round trip; their answers in order.

        Raises:
            HostUnreachableError: the destination cannot be reached, or has no shell.
        """
        with self._lock:
            for attempt in (1, 2):
                fresh = self._process is None
                try:
                    return self._exchange(lines, timeout_s)
                except _SessionLost as lost:
                    self._drop()
                    if fresh or attempt == 2:
                        raise HostUnreachableError(
                            f"{self.name}: the connection was lost: {lost}", fix="try again"
                        ) from lost
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the shell. The shared connection stays for the next command."""
        with self._lock:
            self._drop()

    def _exchange(self, lines: list[str], timeout_s: float) -> list[ShellAnswer]:
        script = "\n".join(lines)
        if self._process is None:
            self._open()
            script = f"M={self._mark.decode()}\n{PRELUDE}\nprintf '%s hello\\n' \"$M\"\n{script}"
            hello = True
        else:
            hello = False
        self._write(f"{{ {script}\n}} </dev/null\nprintf '\\n%s done\\n' \"$M\"\n".encode())
        deadline = time.monotonic() + timeout_s
        if hello:
            self._read_until(self._mark + b" hello\n", time.monotonic() + _HELLO_S, banner=True)
        data = self._read_until(b"\n" + self._mark + b" done\n", deadline, banner=False)
        self.round_trips += 1
        parts = parse_answers(data, self._mark)
        if len(parts) != len(lines):
            raise _SessionLost(f"{len(parts)} answers to {len(lines)} reads")
        return parts

    def _open(self) -> None:
        self._transport.open()
        self._mark = b"fb" + secrets.token_hex(16).encode()
        self._rest = b""
        self._process = subprocess.Popen(
            self._transport.shell_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError as error:
            raise self._why(str(error)) from error

    def _read_until(self, end: bytes, deadline: float, *, banner: bool) -> bytes:
        """Bytes up to ``end``; what follows is kept for the next call."""
        assert self._process is not None
        assert self._process.stdout is not None
        data = bytearray(self._rest)
        searched = 0
        while True:
            found = data.find(end, max(0, searched - len(end)))
            if found >= 0:
                self._rest = bytes(data[found + len(end) :])
                return bytes(data[:found])
            searched = len(data)
            if banner and len(data) > _BANNER_BYTES:
                raise self._why("the login prints without end")
            left = deadline - time.monotonic()
            ready = select.select([self._process.stdout], [], [], max(0.0, left))[0] if left > 0 else []
            if not ready:
                raise self._why("no answer in time", bytes(data) if banner else b"")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._why("it ended", bytes(data) if banner else b"")
            data += chunk

    def _why(self, what: str, banner: bytes | None = None) -> Exception:
        """The reason for a session that ended.

        Before its hello the destination ran no shell, later the connection went.
        """
        said = self._stderr()
        if banner is None:
            return _SessionLost(said.splitlines()[-1] if said else what)
        if banner == b"" and not said:
            return _SessionLost(what)
        return self._transport.not_a_shell(said or banner.decode(errors="replace"))

    def _stderr(self) -> str:
        process = self._process
        if process is None or process.stderr is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.set_blocking(process.stderr.fileno(), False)
        try:
            return (process.stderr.read() or b"").decode(errors="replace").strip()
        except OSError:
            return ""

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class _SessionLost(Exception):
    """The shell ended or does not answer; a new one may."""
