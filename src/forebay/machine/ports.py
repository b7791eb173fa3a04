"""TCP ports: free, listening and whose, or bound by someone who does not listen (yet)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from forebay.machine.interface import BindResult, Machine

__all__ = ["Listener", "PortReport", "PortState", "listeners", "port_report", "socket_owners"]

_LISTEN, _TIME_WAIT = "0A", "06"


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket. ``pids``: the processes that hold it (several after a fork); empty where not visible."""

    address: str
    port: int
    inode: int
    pids: tuple[int, ...] = ()


class PortState(StrEnum):
    """What a port is to a server that wants it."""

    FREE = "free"
    LISTENING = "listening"
    BOUND = "bound"
    """Somebody has bound it and does not listen: a vLLM that is still loading does this for minutes."""
    CLOSING = "closing"
    """Only old connections in TIME_WAIT: servers, which set SO_REUSEADDR, get it."""
    DENIED = "denied"
    NO_SUCH_ADDRESS = "no_such_address"


@dataclass(frozen=True, slots=True)
class PortReport:
    """A port's state, and the listeners found on it."""

    port: int
    state: PortState
    listeners: tuple[Listener, ...] = ()

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process that holds a listening socket of this port."""
        return tuple(sorted({pid for listener in self.listeners for pid in listener.pids}))


def listeners(
    machine: Machine, port: int | None = None, *, owners: bool = True, pids: Iterable[int] | None = None
) -> list[Listener]:
    """Listening sockets, of one port or of all.

    Args:
        owners: look up who holds them (reads every process's descriptors).
        pids: look only at these processes.
    """
    found = [
        Listener(address, local_port, inode)
        for address, local_port, state, inode in _sockets(machine)
        if state == _LISTEN and (port is None or local_port == port)
    ]
    if not owners or not found:
        return found
    holders = socket_owners(machine, {item.inode for item in found}, pids)
    return [Listener(item.address, item.port, item.inode, tuple(sorted(holders.get(item.inode, ())))) for item in found]


def port_report(machine: Machine, port: int, host: str = "127.0.0.1") -> PortReport:
    """Can a server have ``host``:``port``, and if not, who has it."""
    found = tuple(listeners(machine, port))
    if found:
        return PortReport(port, PortState.LISTENING, found)
    result = machine.try_bind(host, port)
    if result is BindResult.TAKEN:
        waiting = any(local == port and state == _TIME_WAIT for _, local, state, _ in _sockets(machine))
        return PortReport(port, PortState.CLOSING if waiting else PortState.BOUND)
    return PortReport(port, PortState(result.value))


def socket_owners(machine: Machine, inodes: set[int], pids: Iterable[int] | None = None) -> dict[int, set[int]]:
    """Socket inode -> pids that hold it, as far as their descriptors may be read."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    holders: dict[int, set[int]] = {}
    names = [str(pid) for pid in pids] if pids is not None else [n for n in machine.listdir("/proc") if n.isdigit()]
    for name in names:
        try:
            descriptors = machine.listdir(f"/proc/{name}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                target = machine.readlink(f"/proc/{name}/fd/{descriptor}")
            except OSError:
                continue
            if target in wanted:
                holders.setdefault(wanted[target], set()).add(int(name))
    return holders


def _sockets(machine: Machine) -> list[tuple[str, int, str, int]]:
    """(address, port, state, inode) of every TCP socket, IPv4 and IPv6."""
    rows = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = machine.read(path).splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9:
                address, _, port = fields[1].rpartition(":")
                rows.append((_address(address), int(port, 16), fields[3], int(fields[9])))
    return rows


def _address(text: str) -> str:
    """The kernel prints addresses as hexadecimal words in host order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, data)
