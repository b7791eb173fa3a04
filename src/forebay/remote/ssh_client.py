"""The user's own OpenSSH client: one shared connection per host (ControlMaster), and its failures as one line.

Configuration, agent, jump hosts, certificates and host keys are the user's. Nothing is asked for (BatchMode) and no
check is turned off. ``FOREBAY_SSH`` replaces the command, such as ``ssh -F /path/to/config``."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import HostUnreachableError, UsageError
from forebay.remote.destination import SshHop

__all__ = ["SshConnection"]

_CONNECT_S = 10
_MASTER_S = 45.0  # name lookup, connecting, a jump host, a hardware key
_PERSIST_S = 120
_ALIVE_S, _ALIVE_COUNT = 3, 3
_CONTROL_S = 5.0


class SshConnection:
    """The shared connection to one host. It stays for two minutes after its last use, for the next command."""

    def __init__(self, hop: SshHop, name: str) -> None:
        self._hop = hop
        self._name = name
        self._socket = _socket_folder() / hashlib.sha256(f"{_ssh_command()}\0{hop}".encode()).hexdigest()[:16]

    def command(self, remote: str) -> list[str]:
        """The command line that runs ``remote`` on the host over the shared connection.

        Args:
            remote: passed to the user's login shell there: plain words only, which mean the same to every shell.
        """
        return [*self._base(), "-T", "--", self._hop.host, remote]

    def open(self) -> None:
        """Make sure that the shared connection is there.

        Raises:
            HostUnreachableError: it cannot be made; says why and what to do.
        """
        with self._lock():
            if not self.is_open():
                self._start_master()

    def is_open(self) -> bool:
        """The process of the shared connection is there. (The network may be gone all the same.)"""
        return self.master_pid() is not None

    def master_pid(self) -> int | None:
        """The process of the shared connection; another one than before means that forwarded ports are gone."""
        done = self._run_control("check")
        found = re.search(rb"pid=(\d+)", done.stderr + done.stdout)
        return int(found[1]) if done.returncode == 0 and found else None

    def close(self) -> None:
        """End the shared connection, with all sessions and forwarded ports on it."""
        self._run_control("exit")
        with contextlib.suppress(OSError):
            self._socket.unlink()

    def forward(self, local_port: int, remote_host: str, remote_port: int) -> str | None:
        """Forward 127.0.0.1:``local_port`` to a port that the host reaches; None, or why it cannot be."""
        rule = f"127.0.0.1:{local_port}:{_bracketed(remote_host)}:{remote_port}"
        done = self._run_control("forward", "-L", rule)
        return None if done.returncode == 0 else _last_line(done.stderr) or "the connection is gone"

    def cancel_forward(self, local_port: int, remote_host: str, remote_port: int) -> None:
        """Take a forwarded port back."""
        self._run_control("cancel", "-L", f"127.0.0.1:{local_port}:{_bracketed(remote_host)}:{remote_port}")

    def _base(self, *options: str) -> list[str]:
        words = _ssh_command()
        for option in ("BatchMode=yes", f"ControlPath={self._socket}", *(options or ("ControlMaster=no",))):
            words += ["-o", option]
        if self._hop.user is not None:
            words += ["-l", self._hop.user]
        return words if self._hop.port is None else [*words, "-p", str(self._hop.port)]

    def _start_master(self) -> None:
        options = (
            "ControlMaster=yes", f"ControlPersist={_PERSIST_S}", f"ConnectTimeout={_CONNECT_S}",
            f"ServerAliveInterval={_ALIVE_S}", f"ServerAliveCountMax={_ALIVE_COUNT}", "ExitOnForwardFailure=no",
        )  # fmt: skip
        words = self._base(*options)
        with tempfile.NamedTemporaryFile(prefix="forebay-ssh-") as log:
            words += ["-E", log.name, "-f", "-N", "-T", "--", self._hop.host]
            try:
                done = subprocess.run(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=_MASTER_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise self._unreachable("Connection timed out") from None
            said = Path(log.name).read_text(errors="replace") + done.stderr.decode(errors="replace")
        if done.returncode != 0:
            raise self._unreachable(said)

    def _unreachable(self, said: str) -> HostUnreachableError:
        try_it = " ".join([*map(shlex.quote, _ssh_command()), shlex.quote(str(self._hop))])
        if self._hop.port is not None:
            user = f"{self._hop.user}@" if self._hop.user else ""
            try_it = " ".join([*map(shlex.quote, _ssh_command()), "-p", str(self._hop.port), f"{user}{self._hop.host}"])
        for pattern, text, fix in _FAILURES:
            if re.search(pattern, said, re.IGNORECASE):
                return HostUnreachableError(f"{self._name}: {text}", fix=fix.format(ssh=try_it, host=self._hop.host))
        return HostUnreachableError(
            f"{self._name}: ssh failed: {_last_line(said.encode()) or 'no message'}", fix=f"`{try_it}` must work first"
        )

    def _run_control(self, action: str, *more: str) -> subprocess.CompletedProcess[bytes]:
        words = [*self._base(), "-O", action, *more, "--", self._hop.host]
        try:
            return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CONTROL_S)
        except subprocess.TimeoutExpired as error:
            return subprocess.CompletedProcess(words, 255, b"", str(error).encode())

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Of two commands at once one makes the connection; a second master would stay without a socket for ever."""
        with open(os.open(f"{self._socket}.lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as lock:
            deadline = time.monotonic() + 2 * _MASTER_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise HostUnreachableError(
                            f"{self._name}: another command has been connecting for {2 * _MASTER_S:.0f} s",
                            fix="try again",
                        ) from None
                    time.sleep(0.05)
            yield


# (pattern in ssh's messages, what it means, what to do); the first that matches is taken
_FAILURES = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Offending .* key in",
        "its host key has changed since it was first seen",
        "if the host was installed anew: `ssh-keygen -R {host}`, then accept its key with `{ssh}`; "
        "if not, ask its administrator",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "its host key is not known here",
        "connect once with `{ssh}`, compare the key's fingerprint and accept it",
    ),
    (
        r"Permission denied|Too many authentication failures|No supported authentication methods|sign_and_send_pubkey",
        "it accepted no key of this user (nothing is asked for here, neither password nor passphrase)",
        "`{ssh}` must work without a question: `ssh-add`, or IdentityFile in ~/.ssh/config",
    ),
    (r"Could not resolve hostname", "its name cannot be resolved", "check the name, or add it to ~/.ssh/config"),
    (r"Connection refused", "it refused the connection", "is sshd running there, on this port? see `{ssh} -v`"),
    (
        r"timed out|timeout",
        f"it did not answer within {_CONNECT_S} s",
        "is it up, and does this network reach it? see `{ssh} -v`",
    ),
    (
        r"No route to host|Network is unreachable|Host is down",
        "the network does not reach it",
        "check the network, VPN and jump host",
    ),
    (
        r"Connection (closed|reset)|kex_exchange_identification|Broken pipe",
        "it closed the connection before a login",
        "its sshd may have too many connections (MaxStartups) or block this address; try again, and see its log",
    ),
    (
        r"no matching (host key type|cipher|key exchange|MAC)",
        "client and server share no algorithm",
        "update the older one; `{ssh} -v` shows both lists",
    ),
    (
        r"Bad configuration option|terminating, \d+ bad|Bad owner or permissions",
        "the configuration of ssh on this machine is refused by ssh",
        "`{ssh}` shows the line",
    ),
)


def _ssh_command() -> list[str]:
    words = shlex.split(os.environ.get("FOREBAY_SSH") or "ssh")
    if shutil.which(words[0]) is None:
        raise UsageError(f"{words[0]} is not installed here", fix="install the OpenSSH client (openssh-client)")
    return words


def _socket_folder() -> Path:
    """A short path that only this user can enter: socket paths are limited to about 100 bytes."""
    root = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(root) / "forebay" if root and Path(root).is_dir() else Path(f"/tmp/forebay-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    numbers = folder.lstat()
    if numbers.st_uid != os.getuid() or numbers.st_mode & 0o077:
        raise UsageError(f"{folder} may be entered by others", fix=f"chmod 700 {folder}, or remove it")
    return folder


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _last_line(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
