"""How much of the server one client may take: sizes and times of a connection."""

from __future__ import annotations

import resource

import msgspec

__all__ = ["ConnectionLimits", "connections_that_fit", "raise_open_files"]

_RESERVED_FILES = 64
"""Descriptors that the process needs beside its connections."""


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of every connection."""

    max_connections: int
    """Connections at once; one more is answered 503 and closed."""
    timeout_s: float
    """A client may take this long for a request's head, and may leave a part of its answer unread for as long."""
    max_head_bytes: int = 64 * 2**10
    """Request line and header fields together; more is answered 431."""
    max_body_bytes: int = 64 * 2**20
    """More is answered 413."""
    body_bytes_per_s: int = 64 * 2**10
    """A body may take ``timeout_s`` and beyond that a second for every so many bytes received."""

    def body_deadline_s(self, received: int) -> float:
        """Seconds from a body's start in which more than ``received`` bytes must have come."""
        return self.timeout_s + received / self.body_bytes_per_s


def raise_open_files() -> None:
    """Raise this process's soft limit of open files to the hard one: the usual 1,024 is less than a crowd of
    clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_that_fit(wanted: int) -> int:
    """``wanted`` connections, or as many as the process may have open files for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _RESERVED_FILES))
