"""Which version of a server is installed here, from package metadata alone; None where none is."""

from __future__ import annotations

from forebay import __version__
from forebay.errors import ForebayError

__all__ = ["version_of"]


def version_of(server: str) -> str | None:
    """The version ``forebay up`` would start, or None: then the newest known version is planned for."""
    if server == "embedded":
        return __version__
    from forebay.servers.install import find_installation
    from forebay.servers.registry import server_named

    try:
        return find_installation(server, server_named(server).distributions).version
    except ForebayError:
        return None
