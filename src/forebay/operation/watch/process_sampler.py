"""Samples a server's processes and its port, cheaply enough to go on for as long as the server lives.

A whole scan of /proc finds new processes (every ``scan_s``); between scans only the known ones are read. A process that
was essential once and is gone is remembered as lost: that is how a killed worker is noticed before the API server is.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.machine.interface import Machine
from forebay.machine.ports import Listener, listeners, socket_owners
from forebay.machine.processes import (
    ProcessId,
    ProcessInfo,
    all_processes,
    boot_id,
    descendants,
    io_bytes,
    read_process,
    session_members,
)
from forebay.operation.watch.observation import Activity, LostProcess, Owner, OwnerKind, WatchedProcess
from forebay.servers.base import ProcessView, Role, Server
from forebay.servers.http_client import Address

__all__ = ["ProcessSample", "ProcessSampler"]

_ESSENTIAL = (Role.API_SERVER, Role.ENGINE, Role.WORKER)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """The processes now, what they used, and who holds the port."""

    processes: tuple[WatchedProcess, ...]
    lost: tuple[LostProcess, ...]
    activity: Activity
    owner: Owner


class ProcessSampler:
    """Follows the processes of one server.

    Args:
        api_server: the process that was launched, or the listener; None while it is not known.
        session: the API server leads a session of its own, so every process in it belongs to the server.
    """

    def __init__(
        self,
        machine: Machine,
        server: Server,
        address: Address,
        api_server: ProcessId | None,
        *,
        session: bool,
    ) -> None:
        self._machine = machine
        self._server = server
        self._address = address
        self._session = session
        self._boot = boot_id(machine)
        self.api_server = api_server
        self.members: dict[int, ProcessInfo] = {}
        """Processes of the server that are still there, zombies included."""
        self._roles: dict[int, Role] = {}
        self._first_seen: dict[int, float] = {}
        self._lost: dict[int, LostProcess] = {}
        self._scanned_at: float | None = None
        self._foreign: tuple[int, Owner] | None = None
        self._held: tuple[int, Owner] | None = None

    def sample(self, at: float, *, scan_s: float) -> ProcessSample:
        """Read the processes and the port now.

        Args:
            at: monotonic seconds.
            scan_s: scan all of /proc if the last scan is this many seconds ago; else read the known processes only.
        """
        whole = self._scanned_at is None or at - self._scanned_at >= scan_s
        if self.api_server is not None:
            if whole:
                self._scan(at)
            else:
                self._refresh()
        owner = (None if whole else self._still_own()) or self._owner()
        alive = [info for info in self.members.values() if not info.is_zombie]
        watched = tuple(
            WatchedProcess(info.pid, self._roles.get(info.pid, Role.HELPER), info.state, info.command) for info in alive
        )
        return ProcessSample(watched, tuple(self._lost.values()), self._activity(alive), owner)

    def follow(self, api_server: ProcessId) -> None:
        """Follow ``api_server`` from now on: the process behind a listening socket that was found later."""
        self.api_server, self._scanned_at, self._held = api_server, None, None
        for known in (self.members, self._roles, self._lost, self._first_seen):
            known.clear()

    def ended(self, exit_code: int) -> None:
        """Note that the API server, a child of the calling process, has ended and was reaped."""
        if self.api_server is not None:
            info = self.members.pop(self.api_server.pid, None)
            title = info.command if info is not None else "the process that was launched"
            self._lost[self.api_server.pid] = LostProcess(self.api_server.pid, Role.API_SERVER, title, exit_code)

    def identities(self) -> list[ProcessId]:
        """The identities of the members, for the record."""
        return [ProcessId(info.pid, info.start_ticks, self._boot) for info in self.members.values()]

    def names(self) -> dict[str, str]:
        """pid -> role and title, for the record."""
        return {
            str(pid): f"{self._roles.get(pid, Role.HELPER)} {info.command[:80].strip()}"
            for pid, info in self.members.items()
        }

    def _scan(self, at: float) -> None:
        self._scanned_at = at
        assert self.api_server is not None
        api_server = self.api_server
        everyone = all_processes(self._machine)
        found = next((info for info in everyone if info.pid == api_server.pid), None)
        here = found is not None and found.start_ticks == api_server.start_ticks
        reused = found is not None and not here  # another process has the number now, and its session
        own: dict[int, ProcessInfo] = {}
        if found is not None and here:
            own = {found.pid: found, **{info.pid: info for info in descendants(everyone, api_server.pid)}}
        elif api_server.pid not in self.members:
            self._lost.setdefault(
                api_server.pid, LostProcess(api_server.pid, Role.API_SERVER, "the process that was named")
            )
        for info in everyone:
            known = self.members.get(info.pid)
            if known is not None and known.start_ticks == info.start_ticks:
                own[info.pid] = info  # an orphan still belongs to the server
                own.update({child.pid: child for child in descendants(everyone, info.pid)})
        if self._session and not reused:
            own.update({info.pid: info for info in session_members(everyone, api_server.pid)})
        full = {pid: read_process(self._machine, pid) for pid in own}
        self._replace({pid: info for pid, info in full.items() if info is not None}, at)

    def _refresh(self) -> None:
        fresh: dict[int, ProcessInfo] = {}
        for pid, known in self.members.items():
            info = read_process(self._machine, pid, cmdline=False)
            if info is not None and info.start_ticks == known.start_ticks:
                fresh[pid] = _with_command(info, known.cmdline)
        self._replace(fresh, None)

    def _replace(self, fresh: dict[int, ProcessInfo], scanned_at: float | None) -> None:
        for pid, before in self.members.items():
            now = fresh.get(pid)
            if now is None or (now.is_zombie and not before.is_zombie):
                self._note_lost(before)
        self.members = fresh
        if scanned_at is None:
            return
        views = [ProcessView(info.pid, info.ppid, info.name, info.command) for info in fresh.values()]
        assert self.api_server is not None
        for pid, role in self._server.roles(views, self.api_server.pid).items():
            if not fresh[pid].is_zombie:
                self._roles[pid] = role
            self._first_seen.setdefault(pid, scanned_at)

    def _note_lost(self, gone: ProcessInfo) -> None:
        role = self._roles.get(gone.pid, Role.HELPER)
        if role in _ESSENTIAL:
            self._lost.setdefault(gone.pid, LostProcess(gone.pid, role, gone.command))

    def _activity(self, alive: list[ProcessInfo]) -> Activity:
        read = 0
        for info in alive:
            numbers = io_bytes(self._machine, info.pid)
            read += max(numbers.read_chars, numbers.read_storage) if numbers is not None else 0
        engines = [info for info in alive if self._roles.get(info.pid) in (Role.ENGINE, Role.WORKER)]
        return Activity(
            cpu_s=sum(info.cpu_s for info in alive),
            engine_cpu_s=sum(info.cpu_s for info in engines),
            rss_bytes=sum(info.rss_bytes for info in alive),
            read_bytes=read,
        )

    def _owner(self) -> Owner:
        if not self._address.is_local:
            return Owner(OwnerKind.HIDDEN)
        found = listeners(self._machine, self._address.port, owners=False)
        serving = _answering(found, self._address.host)
        if serving is None:
            self._foreign = None
            return Owner(OwnerKind.NONE)
        if self.members:
            holders = socket_owners(self._machine, {serving.inode}, self.members).get(serving.inode)
            if holders:
                pid = min(holders)
                self._held = (serving.inode, Owner(OwnerKind.OWN, pid, self.members[pid].command))
                return self._held[1]
        return self._other_owner(serving)

    def _still_own(self) -> Owner | None:
        """Whether the process that held the socket still does; the table of all sockets is long on a busy server."""
        if self._held is None:
            return None
        inode, owner = self._held
        if owner.pid in self.members and socket_owners(self._machine, {inode}, [owner.pid]):
            return owner
        self._held = None
        return None

    def _other_owner(self, serving: Listener) -> Owner:
        """The holder outside the server. Reads every process's descriptors, so once per socket only."""
        if self._foreign is not None and self._foreign[0] == serving.inode:
            return self._foreign[1]
        pids = socket_owners(self._machine, {serving.inode}).get(serving.inode)
        if not pids:
            owner = Owner(OwnerKind.HIDDEN)
        else:
            info = read_process(self._machine, min(pids))
            owner = Owner(OwnerKind.OTHER, min(pids), info.command if info is not None else "")
            self._foreign = (serving.inode, owner)
        return owner


def _answering(found: list[Listener], host: str) -> Listener | None:
    """The socket that a connection to ``host`` reaches: the exact address before a wildcard."""
    if not found:
        return None
    wildcard = ("0.0.0.0", "::")
    if host in wildcard:
        return found[0]
    exact = "127.0.0.1" if host == "localhost" else host
    ranked = sorted(found, key=lambda item: (item.address != exact, item.address not in wildcard))
    best = ranked[0]
    return best if best.address == exact or best.address in wildcard else None


def _with_command(info: ProcessInfo, cmdline: tuple[str, ...]) -> ProcessInfo:
    return ProcessInfo(
        info.pid, info.start_ticks, info.name, info.state, info.ppid, info.pgid, info.sid, info.cpu_s, info.threads,
        info.rss_bytes, info.started_s, cmdline,
    )  # fmt: skip
