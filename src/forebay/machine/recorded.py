"""A machine that is a folder: every look answers what was recorded, so plan,
doctor and status can be tested on any host.

The folder holds

    files/<absolute path>     the bytes of each file that was read
    looks.json                listings, links, file numbers, spaces, commands, answers, binds, GPUs, clock, and failures

``RecordingMachine`` writes such a folder while it passes every look through to a real machine.
"""

from __future__ import annotations

import base64
import errno as errno_module
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from forebay.errors import UsageError
from forebay.machine.interface import (
    BindResult,
    Child,
    CommandResult,
    FileStat,
    GpuReading,
    HttpAnswer,
    HttpFailure,
    HttpFailureKind,
    Machine,
    Space,
    Tail,
)

__all__ = ["RecordedMachine", "RecordingMachine"]

_T = TypeVar("_T")


class RecordedMachine:
    """Answers from a folder. What was not recorded is not there; acts (signal, remove) are only noted in ``acts``."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        try:
            self._looks: dict[str, Any] = json.loads((folder / "looks.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} is no recorded machine: {error}") from error
        self.name = str(self._looks.get("name", folder.name))
        self.acts: list[tuple[str, object]] = []

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
        self._fail("read", path)
        try:
            data = (self._files / path.lstrip("/")).read_bytes()
        except OSError as error:
            raise FileNotFoundError(errno_module.ENOENT, "not recorded", path) from error
        return data[offset:] if limit is None else data[offset : offset + limit]

    def read(self, path: str) -> str:
        return self.read_bytes(path).decode("utf-8", "replace")

    def tail(self, path: str, offset: int, inode: int | None = None, limit: int = 1 << 20) -> Tail:
        data = self.read_bytes(path)
        replaced = len(data) < offset
        start = 0 if replaced else offset
        return Tail(data[start : start + limit], min(len(data), start + limit), 1, replaced)

    def listdir(self, path: str) -> list[str]:
        return list(self._look("list", path))

    def readlink(self, path: str) -> str:
        return str(self._look("link", path))

    def stat(self, path: str) -> FileStat:
        return FileStat(**self._look("stat", path))

    def space(self, path: str) -> Space:
        return Space(**self._look("space", path))

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 10.0, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        found = self._looks.get("run", {}).get(" ".join(argv))
        if found is None:
            return CommandResult(tuple(argv), 127, "", "not recorded")
        return CommandResult(tuple(argv), found["exit_code"], found["stdout"], found["stderr"])

    def http(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> HttpAnswer:
        found = self._looks.get("http", {}).get(f"{method} {url}")
        if found is None:
            raise HttpFailure(HttpFailureKind.REFUSED, "not recorded", 0.0)
        if "failure" in found:
            raise HttpFailure(HttpFailureKind(found["failure"]), found["detail"], found["seconds"])
        data = base64.b64decode(found["body"])
        return HttpAnswer(found["status"], found["headers"], data, found["seconds"])

    def try_bind(self, host: str, port: int) -> BindResult:
        return BindResult(self._looks.get("bind", {}).get(f"{host}:{port}", BindResult.FREE.value))

    def gpus(self) -> list[GpuReading]:
        readings = self._looks.get("gpus", [])
        return [GpuReading(**{**r, "processes": {int(k): v for k, v in r["processes"].items()}}) for r in readings]

    def now(self) -> float:
        return float(self._looks.get("now", 0.0))

    def signal(self, pid: int, number: int, start_ticks: int) -> bool:
        self.acts.append(("signal", (pid, number, start_ticks)))
        return True

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log_path: str) -> Child:
        raise PermissionError(errno_module.EPERM, "a recorded machine starts nothing", argv[0])

    def remove(self, path: str) -> None:
        self.acts.append(("remove", path))

    def _look(self, kind: str, path: str) -> Any:
        self._fail(kind, path)
        try:
            return self._looks[kind][path]
        except KeyError:
            raise FileNotFoundError(errno_module.ENOENT, "not recorded", path) from None

    def _fail(self, kind: str, path: str) -> None:
        number = self._looks.get("failures", {}).get(f"{kind} {path}")
        if number is not None:
            raise OSError(number, "as recorded", path)


class RecordingMachine:
    """Passes every look through to ``machine`` and keeps it; ``save`` writes the folder. Acts are passed on,
    not kept.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._files: dict[str, bytes] = {}
        self._looks: dict[str, Any] = {"name": machine.name, "failures": {}}
        self.name: str = machine.name

    def save(self, folder: Path) -> None:
        """Write everything seen so far. Refuses nothing: the folder is made, files in it are replaced."""
        for path, data in self._files.items():
            target = folder / "files" / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "looks.json").write_text(json.dumps(self._looks, indent=1, sort_keys=True) + "\n", encoding="utf-8")

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
        data = self._keep_failure("read", path, lambda: self._machine.read_bytes(path))
        self._files[path] = data
        return data[offset:] if limit is None else data[offset : offset + limit]

    def read(self, path: str) -> str:
        return self.read_bytes(path).decode("utf-8", "replace")

    def tail(self, path: str, offset: int, inode: int | None = None, limit: int = 1 << 20) -> Tail:
        self.read_bytes(path)
        return self._machine.tail(path, offset, inode, limit)

    def listdir(self, path: str) -> list[str]:
        return self._keep("list", path, lambda: self._machine.listdir(path), lambda names: names)

    def readlink(self, path: str) -> str:
        return self._keep("link", path, lambda: self._machine.readlink(path), str)

    def stat(self, path: str) -> FileStat:
        return self._keep("stat", path, lambda: self._machine.stat(path), asdict)

    def space(self, path: str) -> Space:
        return self._keep("space", path, lambda: self._machine.space(path), asdict)

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 10.0, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        done = self._machine.run(argv, timeout_s=timeout_s, env=env)
        kept = {"exit_code": done.exit_code, "stdout": done.stdout, "stderr": done.stderr}
        self._looks.setdefault("run", {})[" ".join(argv)] = kept
        return done

    def http(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> HttpAnswer:
        kept = self._looks.setdefault("http", {})
        try:
            answer = self._machine.http(method, url, body=body, headers=headers, timeout_s=timeout_s)
        except HttpFailure as failure:
            kept[f"{method} {url}"] = {"failure": failure.kind, "detail": failure.detail, "seconds": failure.seconds}
            raise
        kept[f"{method} {url}"] = {
            "status": answer.status,
            "headers": dict(answer.headers),
            "body": base64.b64encode(answer.body).decode(),
            "seconds": answer.seconds,
        }
        return answer

    def try_bind(self, host: str, port: int) -> BindResult:
        result = self._machine.try_bind(host, port)
        self._looks.setdefault("bind", {})[f"{host}:{port}"] = result.value
        return result

    def gpus(self) -> list[GpuReading]:
        readings = self._machine.gpus()
        self._looks["gpus"] = [
            {**asdict(r), "processes": {str(k): v for k, v in r.processes.items()}} for r in readings
        ]
        return readings

    def now(self) -> float:
        self._looks["now"] = self._machine.now()
        return float(self._looks["now"])

    def signal(self, pid: int, number: int, start_ticks: int) -> bool:
        return self._machine.signal(pid, number, start_ticks)

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log_path: str) -> Child:
        return self._machine.spawn(argv, env=env, cwd=cwd, log_path=log_path)

    def remove(self, path: str) -> None:
        self._machine.remove(path)

    def _keep(self, kind: str, path: str, call: Callable[[], _T], simplify: Callable[[_T], Any]) -> _T:
        value = self._keep_failure(kind, path, call)
        self._looks.setdefault(kind, {})[path] = simplify(value)
        return value

    def _keep_failure(self, kind: str, path: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except OSError as error:
            self._looks["failures"][f"{kind} {path}"] = error.errno or errno_module.EIO
            raise
