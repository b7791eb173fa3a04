"""This machine."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat as stat_module
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from forebay.machine import http
from forebay.machine.interface import (
    BindResult,
    Child,
    CommandResult,
    FileStat,
    GpuReading,
    HttpAnswer,
    Space,
    Tail,
)
from forebay.machine.nvidia_smi import GPU_QUERY, PROCESS_QUERY, parse_gpus
from forebay.machine.proc_stat import parse_stat

__all__ = ["LocalMachine", "free_local_port"]


class LocalMachine:
    """The machine this process runs on."""

    name = "local"

    def batch(
        self,
        *,
        read: Sequence[str] = (),
        globs: Sequence[str] = (),
        folders: Sequence[str] = (),
        spaces: Sequence[str] = (),
        commands: Sequence[Sequence[str]] = (),
        clock: bool = False,
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def read_bytes(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        with open(path, "rb") as file:
            if offset:
                file.seek(offset)
            return file.read() if limit is None else file.read(limit)

    def read(self, path: str) -> str:
        return self.read_bytes(path).decode("utf-8", "replace")

    def tail(self, path: str, offset: int, inode: int | None = None, limit: int = 1 << 20) -> Tail:
        with open(path, "rb") as file:
            numbers = os.fstat(file.fileno())
            replaced = (inode is not None and numbers.st_ino != inode) or numbers.st_size < offset
            start = 0 if replaced else offset
            file.seek(start)
            data = file.read(limit)
        return Tail(data, start + len(data), numbers.st_ino, replaced)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def readlink(self, path: str) -> str:
        return os.readlink(path)

    def stat(self, path: str) -> FileStat:
        numbers = os.stat(path)
        return FileStat(
            size_bytes=numbers.st_size,
            allocated_bytes=numbers.st_blocks * 512,
            mtime_s=numbers.st_mtime,
            inode=numbers.st_ino,
            is_dir=stat_module.S_ISDIR(numbers.st_mode),
            uid=numbers.st_uid,
        )

    def space(self, path: str) -> Space:
        numbers = os.statvfs(path)
        return Space(numbers.f_blocks * numbers.f_frsize, numbers.f_bavail * numbers.f_frsize)

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 10.0, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        words = tuple(argv)
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                timeout=timeout_s,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return CommandResult(words, 124, _text(error.stdout), f"no end after {timeout_s:g} s")
        except OSError as error:
            return CommandResult(words, 127, "", str(error))
        return CommandResult(words, done.returncode, _text(done.stdout), _text(done.stderr))

    def http(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> HttpAnswer:
        return http.request(method, url, body=body, headers=headers, timeout_s=timeout_s)

    def try_bind(self, host: str, port: int) -> BindResult:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except PermissionError:
                return BindResult.DENIED
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    return BindResult.NO_SUCH_ADDRESS
                return BindResult.TAKEN
        return BindResult.FREE

    def gpus(self) -> list[GpuReading]:
        from forebay.machine.nvml import has_nvml, read_gpus

        if has_nvml():
            return read_gpus()
        gpus = self.run(GPU_QUERY)
        return parse_gpus(gpus, self.run(PROCESS_QUERY)) if gpus.exit_code == 0 else []

    def now(self) -> float:
        return time.time()

    def signal(self, pid: int, number: int, start_ticks: int) -> bool:
        # the pidfd pins the process: a pid reused between our look and the signal cannot be hit
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if parse_stat(self.read(f"/proc/{pid}/stat")).start_ticks != start_ticks:
                return False
            signal.pidfd_send_signal(handle, number)
        except (ProcessLookupError, FileNotFoundError):
            return False
        finally:
            os.close(handle)
        return True

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log_path: str) -> Child:
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab") as log:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                close_fds=True,
            )
        return _LocalChild(process)

    def remove(self, path: str) -> None:
        Path(path).unlink()


def free_local_port(wanted: int) -> int:
    """``wanted`` where it is free on 127.0.0.1, else another free port."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError(errno.EADDRINUSE, "no port is free on 127.0.0.1")


class _LocalChild:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def _text(data: bytes | str | None) -> str:
    if isinstance(data, bytes):
        return data.decode("utf-8", "replace")
    return data or ""
