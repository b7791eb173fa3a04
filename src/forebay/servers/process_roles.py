"""Roles of a server's processes, by their titles and parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.servers.base import ProcessView, Role

__all__ = ["tree_roles"]


def tree_roles(
    processes: Sequence[ProcessView], api_server: int, titles: Mapping[str, Role], *, every_python: Role | None = None
) -> dict[int, Role]:
    """pid -> role, by the title a process has set, else by how it was started.

    Args:
        processes: the process tree, orphans included.
        api_server: pid of the process that was launched.
        titles: part of a title -> role. (A title replaces the command line.)
        every_python: the role of a multiprocessing child without a title.
    """
    roles: dict[int, Role] = {}
    for process in processes:
        words = process.command.strip()
        if process.pid == api_server:
            roles[process.pid] = Role.API_SERVER
        elif "resource_tracker" in words:
            roles[process.pid] = Role.TRACKER
        elif (titled := next((role for title, role in titles.items() if title in words), None)) is not None:
            roles[process.pid] = titled
        elif every_python is not None and "multiprocessing.spawn" in words:
            roles[process.pid] = every_python
        else:
            roles[process.pid] = Role.HELPER
    return roles
