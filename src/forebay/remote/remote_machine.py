"""The ``Machine`` protocol over a POSIX shell: reads without any helper at the destination.

Coreutils are enough. A GPU is read by ``nvidia-smi``; an HTTP request needs ``curl`` or a Python there. Nothing is
started this way (``spawn`` refuses): servers are started by the operator itself on the host (``agent_session``)."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from forebay.machine.interface import (
    BindResult,
    Child,
    CommandResult,
    FileStat,
    GpuReading,
    HttpAnswer,
    HttpFailure,
    HttpFailureKind,
    Space,
    Tail,
)
from forebay.machine.nvidia_smi import GPU_QUERY, PROCESS_QUERY, parse_gpus
from forebay.remote.destination import Destination
from forebay.remote.shell_scripts import ShellAnswer, command_script, glob_script, quote, read_script
from forebay.remote.shell_session import ShellSession
from forebay.remote.transport import Transport

__all__ = ["RemoteMachine", "connect"]

_MAX_FILE_BYTES = 1 << 26
_SIGNAL = """fx sh -c 's=$(cat /proc/$1/stat) || exit 3; set -- "$1" "$2" "$3" ${s##*) }
[ "${23}" = "$3" ] || exit 3; kill -s "$2" "$1"' sh"""


class RemoteMachine:
    """The machine at the other end of ``session``."""

    def __init__(self, session: ShellSession) -> None:
        self._session = session
        self._kept = threading.local()
        self.name: str = session.name

    @contextlib.contextmanager
    def batch(
        self,
        *,
        read: Sequence[str] = (),
        globs: Sequence[str] = (),
        folders: Sequence[str] = (),
        spaces: Sequence[str] = (),
        commands: Sequence[Sequence[str]] = (),
        clock: bool = False,
    ) -> Iterator[None]:
        """Fetch all of this in one round trip; reads of it inside the block are answered from what came."""
        wanted: list[tuple[tuple[str, str], str]] = [(("fr", path), read_script("fr", path)) for path in read]
        wanted += [(("fl", path), read_script("fl", path)) for path in folders]
        wanted += [(("fd", path), read_script("fd", path)) for path in spaces]
        wanted += [(("fx", json.dumps(list(words))), command_script(words, 10.0, None)) for words in commands]
        if clock:
            wanted.append((("clock", ""), _CLOCK))
        if globs:
            wanted.append((("fg", ""), glob_script(globs)))
        before = self._cache()
        found = dict(before)
        for (key, _), part in zip(wanted, self._session.run([line for _, line in wanted]), strict=True):
            for path, content in (part.files or {}).items():
                found["fr", path] = ShellAnswer(content, 0)
            found[key] = part
        self._kept.parts = found
        try:
            yield
        finally:
            self._kept.parts = before

    def read_bytes(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        if offset == 0 and limit is None:
            return self._one(("fr", path), lambda: read_script("fr", path)).checked(path)
        part = self._session.run([read_script("fp", path, offset + 1, _MAX_FILE_BYTES if limit is None else limit)])[0]
        return part.checked(path)

    def read(self, path: str) -> str:
        return self.read_bytes(path).decode("utf-8", "replace")

    def tail(self, path: str, offset: int, inode: int | None = None, limit: int = 1 << 20) -> Tail:
        lines = [read_script("fs", path), read_script("fp", path, offset + 1, limit), read_script("fs", path)]
        before, part, after = self._session.run(lines)
        size, number = _numbers(before.checked(path))
        replaced = (inode is not None and number != inode) or size < offset
        if replaced:
            part = self._session.run([read_script("fp", path, 1, limit)])[0]
            offset = 0
        elif _numbers(after.checked(path))[1] != number:
            return Tail(b"", offset, number, False)  # replaced in between: the next call starts over
        data = part.checked(path)
        return Tail(data, offset + len(data), number, replaced)

    def listdir(self, path: str) -> list[str]:
        data = self._one(("fl", path), lambda: read_script("fl", path)).checked(path)
        return [name.decode("utf-8", "surrogateescape") for name in data.split(b"\0") if name]

    def readlink(self, path: str) -> str:
        data = self._one(("fk", path), lambda: read_script("fk", path)).checked(path)
        return data.removesuffix(b"\n").decode("utf-8", "surrogateescape")

    def stat(self, path: str) -> FileStat:
        data = self._one(("fs", path), lambda: read_script("fs", path)).checked(path).decode()
        size, blocks, block_bytes, mtime, inode, uid, kind = data.split(None, 6)
        return FileStat(
            int(size), int(blocks) * int(block_bytes), float(mtime), int(inode), kind.strip() == "directory", int(uid)
        )

    def space(self, path: str) -> Space:
        text = self._one(("fd", path), lambda: read_script("fd", path)).checked(path).decode()
        fields = text.rsplit(
            None, 5
        )  # device names may hold blanks, mount points may too: count from "kilobytes used avail %"
        numbers = [word for word in fields if word.isdecimal()]
        if len(numbers) < 3:
            raise OSError(errno.EIO, f"df printed {text.strip()[:100]!r}", path)
        return Space(int(numbers[0]) * 1024, int(numbers[2]) * 1024)

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 10.0, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        key = ("fx", json.dumps(list(argv)))
        part = self._cache().get(key) if env is None else None
        if part is None:
            part = self._session.run([command_script(argv, timeout_s, env)], timeout_s=timeout_s + 30.0)[0]
        stderr = part.stderr.decode("utf-8", "replace")
        return CommandResult(tuple(argv), part.status, part.data.decode("utf-8", "replace"), stderr)

    def http(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> HttpAnswer:
        raise HttpFailure(HttpFailureKind.UNREACHABLE, f"{self.name} has no Python for requests to a server there", 0.0)

    def try_bind(self, host: str, port: int) -> BindResult:
        return BindResult.FREE  # listeners are in /proc/net/tcp; a port that is bound without listening is not seen

    def gpus(self) -> list[GpuReading]:
        gpus = self.run(GPU_QUERY)
        return parse_gpus(gpus, self.run(PROCESS_QUERY)) if gpus.exit_code == 0 else []

    def now(self) -> float:
        part = self._one(("clock", ""), lambda: _CLOCK)
        return float(part.data.decode().strip() or 0.0)

    def signal(self, pid: int, number: int, start_ticks: int) -> bool:
        part = self._session.run([f"{_SIGNAL} {pid} {number} {start_ticks}"])[0]
        if part.status == 1:
            raise PermissionError(errno.EPERM, part.stderr.decode(errors="replace").strip(), str(pid))
        return part.status == 0

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log_path: str) -> Child:
        raise PermissionError(errno.EPERM, "a server is started by the operator on its own host", argv[0])

    def remove(self, path: str) -> None:
        part = self._session.run([f"fx rm -f {quote(path)}"])[0]
        if part.status:
            raise OSError(errno.EACCES, part.stderr.decode(errors="replace").strip(), path)

    def _cache(self) -> dict[tuple[str, str], ShellAnswer]:
        return getattr(self._kept, "parts", {})

    def _one(self, key: tuple[str, str], line: Callable[[], str]) -> ShellAnswer:
        part = self._cache().get(key)
        if part is None:
            try:
                script = line()
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error), key[1]) from error
            part = self._session.run([script])[0]
        return part


_CLOCK = "fx date +%s"


def _numbers(data: bytes) -> tuple[int, int]:
    """(size, inode) of a ``stat`` answer."""
    fields = data.split()
    return int(fields[0]), int(fields[4])


@contextlib.contextmanager
def connect(destination: Destination) -> Iterator[RemoteMachine]:
    """The machine at ``destination``, over one shell that is closed at the end."""
    session = ShellSession(Transport(destination))
    try:
        yield RemoteMachine(session)
    finally:
        session.close()
