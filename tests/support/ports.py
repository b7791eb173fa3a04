"""TCP ports for servers under test."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

__all__ = ["free_port"]

_FIRST, _LAST = 20_000, 29_999
"""Below the ports that Linux gives to outgoing connections (net.ipv4.ip_local_port_range, 32768 and up). A port from
``bind(0)`` is one of those: until a server has loaded its model and binds it, any client on the machine can take it.
"""

_locks: list[int] = []


def free_port(count: int = 1) -> int:
    """The first of ``count`` consecutive ports that nobody listens on.

    No other test process on this machine is given them before this process ends.
    """
    folder = Path(tempfile.gettempdir()) / f"forebay-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for first in random.sample(range(_FIRST, _LAST - count), 200):
        ports = range(first, first + count)
        held = [lock for port in ports if (lock := _lock(folder / str(port))) is not None]
        if len(held) == count and all(_can_bind(port) for port in ports):
            _locks.extend(held)
            return first
        for lock in held:
            os.close(lock)
    raise RuntimeError(f"no {count} free ports between {_FIRST} and {_LAST}")


def _lock(path: Path) -> int | None:
    """A lock that ends with this process; None where another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
