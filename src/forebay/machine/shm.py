"""Shared memory in /dev/shm: which files, how large, and who maps them (a file without a mapper is a leftover)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.hostmemory.shm import SHM_FOLDER
from forebay.machine.interface import Machine

__all__ = ["ShmFile", "shm_files", "shm_mappers"]


@dataclass(frozen=True, slots=True)
class ShmFile:
    """One file. ``pids`` map it or hold it open; None: not looked up."""

    name: str
    size_bytes: int
    allocated_bytes: int
    mtime_s: float
    inode: int
    uid: int
    pids: tuple[int, ...] | None = None

    @property
    def path(self) -> str:
        return f"{SHM_FOLDER}/{self.name}"


def shm_files(machine: Machine, *, mappers: bool = True) -> list[ShmFile]:
    """Files in /dev/shm by name (folders are walked); empty where there is no /dev/shm."""
    found = sorted(_walk(machine, ""), key=lambda file: file.name)
    if not mappers or not found:
        return found
    holders = shm_mappers(machine, [file.name for file in found])
    return [_with_pids(file, tuple(sorted(holders.get(file.name, ())))) for file in found]


def shm_mappers(machine: Machine, names: Iterable[str]) -> dict[str, set[int]]:
    """Name -> pids that map it (/proc/PID/maps) or hold a descriptor of it, as far as they may be read."""
    wanted = set(names)
    holders: dict[str, set[int]] = {}
    for entry in machine.listdir("/proc"):
        if not entry.isdigit():
            continue
        for path in _shm_paths(machine, entry):
            name = path.removeprefix(f"{SHM_FOLDER}/").removesuffix(" (deleted)")
            if name in wanted and not path.endswith(" (deleted)"):
                holders.setdefault(name, set()).add(int(entry))
    return holders


def _walk(machine: Machine, below: str) -> list[ShmFile]:
    try:
        names = machine.listdir(f"{SHM_FOLDER}/{below}" if below else SHM_FOLDER)
    except OSError:
        return []
    found: list[ShmFile] = []
    for entry in names:
        name = f"{below}/{entry}" if below else entry
        try:
            numbers = machine.stat(f"{SHM_FOLDER}/{name}")
        except OSError:
            continue
        if numbers.is_dir:
            found += _walk(machine, name)
        else:
            found.append(
                ShmFile(name, numbers.size_bytes, numbers.allocated_bytes, numbers.mtime_s, numbers.inode, numbers.uid)
            )
    return found


def _shm_paths(machine: Machine, pid: str) -> list[str]:
    paths = []
    try:
        for line in machine.read(f"/proc/{pid}/maps").splitlines():
            if SHM_FOLDER in line:
                paths.append(line[line.index(SHM_FOLDER) :])
    except OSError:
        pass
    try:
        descriptors = machine.listdir(f"/proc/{pid}/fd")
    except OSError:
        return paths
    for descriptor in descriptors:
        try:
            target = machine.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(SHM_FOLDER):
            paths.append(target)
    return paths


def _with_pids(file: ShmFile, pids: tuple[int, ...]) -> ShmFile:
    return ShmFile(file.name, file.size_bytes, file.allocated_bytes, file.mtime_s, file.inode, file.uid, pids)
