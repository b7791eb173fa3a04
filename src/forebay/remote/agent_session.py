"""The operator running at a destination, for one request: a request goes in, events and the result come out.

The first exchange finds a Python there and brings the helper's file where it is not there yet. The file is removed by
the last helper that uses it, unless a run is up. Nothing of a request is in a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import select
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.errors import HostUnreachableError
from forebay.remote.agent_bundle import Bundle, make_bundle
from forebay.remote.shell_scripts import quote
from forebay.remote.transport import Transport

__all__ = ["AgentSession", "ConnectionLostError"]

_HELLO_S = 30.0
_BEAT_S = 5.0
_SILENT_S = 20.0
_BANNER_BYTES = 1 << 20

# Runs in a fresh sh. Prints "MARK ready PYTHON" when the helper is there, "MARK send" when its file must be sent (then
# "MARK ready ..." after it), or "MARK WORD DETAIL" for what is missing.
_BOOTSTRAP = r"""{ M=%(mark)s; unset CDPATH ENV; set +e +u +f
FOREBAY_UMASK=$(umask); export FOREBAY_UMASK; umask 077
H=%(home)s; [ -n "$H" ] || H=${FOREBAY_HOME:-}; if [ -z "$H" ]; then
 if [ -z "${HOME:-}" ]; then printf '%%s nohome HOME is not set\n' "$M"; exit 0; fi; H=$HOME/.local/state/forebay; fi
FOREBAY_HOME=$H; export FOREBAY_HOME; P=
for p in %(python)s python3.14 python3.13 python3.12 python3.11 python3.10 python3 \
 "${HOME:-/nonexistent}"/.cache/forebay/peers/*/bin/python /opt/*/bin/python3 /usr/local/bin/python3; do
 [ -n "$p" ] || continue; c=$(command -v -- "$p" 2>/dev/null) || continue
 if "$c" -c 'import sys; sys.exit(sys.version_info < (3, 10))' </dev/null >/dev/null 2>&1; then P=$c; break; fi
 [ "$p" != %(python)s ] || { printf '%%s badpython %%s\n' "$M" "$p"; exit 0; }; done
[ -n "$P" ] || { printf '%%s nopython -\n' "$M"; exit 0; }
D=$H/helper; F=$D/%(digest)s.pyz
e=$( { mkdir -p "$D" && [ -w "$D" ]; } 2>&1 ) || { printf '%%s nohome %%s\n' "$M" "${e:-$D is not writable}"; exit 0; }
if [ ! -f "$F" ]; then printf '%%s send\n' "$M"
 e=$( { head -c %(size)d >"$F.$$"; } 2>&1 ) || { rm -f "$F.$$"; printf '%%s nospace %%s\n' "$M" "$e"; exit 0; }
 s=$(wc -c <"$F.$$"); if [ "$s" -ne %(size)d ]; then rm -f "$F.$$"; printf '%%s nospace cut\n' "$M"; exit 0; fi
 mv "$F.$$" "$F"; fi
printf '%%s ready %%s %%s\n' "$M" "$(date +%%s)" "$P"
exec "$P" -I "$F" agent
}
"""


class ConnectionLostError(Exception):
    """The connection ended, or nothing came for too long; the request may go on over a new one."""


class AgentSession:
    """One helper at the destination of ``transport``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._rest = b""
        self.heard = False
        """Something came back for the request."""
        self.clock_ahead_s = 0.0
        """How far the clock there is ahead of this machine's, to about a second."""

    def start(self) -> None:
        """Reach the destination and start the helper.

        Raises:
            HostUnreachableError: it cannot be reached, or something is missing there.
            ConnectionLostError: the connection ended meanwhile.
        """
        self._transport.open()
        bundle, mark = make_bundle(), "fb" + secrets.token_hex(16)
        self._process = subprocess.Popen(
            self._transport.shell_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._send_bytes(self._bootstrap(bundle, mark).encode())
        word, detail = self._read_word(mark)
        if word == "send":
            self._send_bytes(bundle.data)
            word, detail = self._read_word(mark)
        if word != "ready":
            raise self._missing(word, detail)
        self.clock_ahead_s = float(detail.split()[0]) - time.time()

    def request(self, fields: Mapping[str, Any]) -> None:
        """Send the request and start listening."""
        self.send_request(fields)
        self._heard_at = time.monotonic()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send_request(self, fields: Mapping[str, Any]) -> None:
        """Send the request only; what follows on the streams is up to the caller."""
        env = dict(self._transport.destination.settings.env)
        if self._transport.destination.settings.cache is not None:
            env["FOREBAY_CACHE"] = self._transport.destination.settings.cache
        self._send({**fields, "env": {**env, **fields.get("env", {})}})

    def messages(self) -> Iterator[dict[str, Any]]:
        """What comes back, to the last message (``result`` or ``error``).

        Raises:
            ConnectionLostError: it ended before that.
        """
        while True:
            try:
                message = self._messages.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() - self._heard_at > _SILENT_S:
                    raise ConnectionLostError(f"nothing came for {_SILENT_S:.0f} s") from None
                continue
            if message is None:
                raise ConnectionLostError(self._stderr() or "it ended")
            if "beat" not in message:
                yield message
            if "result" in message or "error" in message:
                return

    def interrupt(self) -> None:
        """Ctrl-C for the helper."""
        with contextlib.suppress(ConnectionLostError):
            self._send({"interrupt": 1})

    def streams(self) -> subprocess.Popen[bytes]:
        """The helper's process, for a request whose answer is not lines (``relay``)."""
        assert self._process is not None
        return self._process

    def close(self) -> None:
        """End this side; the helper ends when it sees that."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _bootstrap(self, bundle: Bundle, mark: str) -> str:
        settings = self._transport.destination.settings
        return _BOOTSTRAP % {
            "mark": mark, "home": quote(settings.home or ""), "python": quote(settings.python or ""),
            "digest": bundle.digest, "size": len(bundle.data),
        }  # fmt: skip

    def _missing(self, word: str, detail: str) -> HostUnreachableError:
        name, settings = self._transport.name, self._transport.destination.settings
        if word == "nopython":
            return HostUnreachableError(
                f"{name}: no Python 3.10 or newer is found there, which runs Forebay's helper",
                fix='name it in hosts.toml: python = "/path/to/python3"; `machine` and `plan` work without',
            )
        if word == "badpython":
            return HostUnreachableError(
                f"{name}: {detail} is not a Python 3.10 or newer", fix="correct python = in hosts.toml"
            )
        if word == "nohome":
            return HostUnreachableError(
                f"{name}: the folder for Forebay's records cannot be written there: {detail}",
                fix='make it writable, or name another one in hosts.toml: home = "/path"',
            )
        return HostUnreachableError(
            f"{name}: the helper could not be written there: {_shell_reason(detail)}",
            fix=f"free some space under {settings.home or '~/.local/state/forebay'}, or name another folder in "
            "hosts.toml: home",
        )

    def _read_word(self, mark: str) -> tuple[str, str]:
        """The next line that carries the mark; what a login prints before is skipped."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, pattern = time.monotonic() + _HELLO_S, re.compile(rf"{mark} (\w+) ?(.*)\n".encode())
        while True:
            found = pattern.search(self._rest)
            if found:
                self._rest = self._rest[found.end() :]
                return found[1].decode(), found[2].decode("utf-8", "replace")
            left = deadline - time.monotonic()
            if len(self._rest) > _BANNER_BYTES or left <= 0:
                raise self._no_shell("the login did not come to a shell in time")
            if not select.select([self._process.stdout], [], [], left)[0]:
                continue
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._no_shell("it ended")
            self._rest += chunk

    def _no_shell(self, what: str) -> Exception:
        said = self._stderr()
        if self._transport.ssh is not None and not self._transport.ssh.is_open():
            return ConnectionLostError(said.splitlines()[-1] if said else what)
        return self._transport.not_a_shell(said or self._rest.decode(errors="replace"))

    def _listen(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        rest = self._rest
        while True:
            try:
                chunk = os.read(process.stdout.fileno(), 1 << 16)
            except (OSError, ValueError):
                chunk = b""
            if not chunk:
                self._messages.put(None)
                return
            self._heard_at, self.heard = time.monotonic(), True
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        self._messages.put(message)

    def _beat(self) -> None:
        while self._process is not None:
            try:
                self._send({"beat": 1})
            except ConnectionLostError:
                return
            time.sleep(_BEAT_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._send_bytes(json.dumps(message).encode() + b"\n")

    def _send_bytes(self, data: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise ConnectionLostError("it is closed")
        with self._lock:
            try:
                process.stdin.write(data)
                process.stdin.flush()
            except (OSError, ValueError) as error:
                raise ConnectionLostError(str(error)) from error

    def _stderr(self) -> str:
        process = self._process
        if process is None or process.stderr is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.set_blocking(process.stderr.fileno(), False)
        try:
            lines = (process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""


def _shell_reason(detail: str) -> str:
    return "the file system is full" if re.search(r"No space left|cut", detail) else detail
