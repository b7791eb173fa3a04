"""The listening socket, opened before anything else is done."""

from __future__ import annotations

import errno
import socket

from forebay.causes import Cause
from forebay.errors import RefusedError, UsageError

__all__ = ["open_listener"]

_BACKLOG = 4096
_SEND_BUFFER = 256 * 2**10
"""Bytes of an answer that the kernel holds for a client that does not read (it doubles the number)."""


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen.

    Args:
        host: a name or an address; ``0.0.0.0`` and ``::`` are all of them.
        port: 0 takes any free one.

    Raises:
        RefusedError: the port is taken, or needs privileges.
        UsageError: no such host or address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(f"--host {host}: {error.strerror}", fix="use an address of this machine") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # its connections inherit it
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from error
    listener.setblocking(False)
    return listener


def _explain(error: OSError, host: str, port: int) -> RefusedError:
    if error.errno == errno.EADDRINUSE:
        return RefusedError(
            f"port {port} on {host} is in use by another process",
            fix=f"stop what listens there, or use another one: --port {port + 1 if port < 65535 else 8000}",
            code=Cause.PORT_IN_USE,
        )
    return RefusedError(f"cannot listen on {host}:{port}: {error.strerror}", code=Cause.BIND_FAILED)
