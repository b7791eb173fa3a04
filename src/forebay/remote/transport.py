"""From a destination to a command line that runs a POSIX shell there: over SSH, into containers, or both."""

from __future__ import annotations

import re
import shutil

from forebay.errors import HostUnreachableError, UsageError
from forebay.remote.destination import Destination
from forebay.remote.ssh_client import SshConnection

__all__ = ["Transport"]

# How the tool of each kind runs a shell in a container. Names hold no character special to a shell (destination.py).
_ENTER = {
    "lxc": "lxc-attach -n {name} -- sh",
    "pct": "pct exec {name} -- sh",
    "docker": "docker exec -i {name} sh",
    "podman": "podman exec -i {name} sh",
    "incus": "incus exec {name} -T -- sh",
}
_FIXES = {
    "lxc": "see `lxc-ls -f` on its host",
    "pct": "see `pct list` on its host, and `pct start {name}`",
    "docker": "see `docker ps` on its host, and `docker start {name}`",
    "podman": "see `podman ps` on its host",
    "incus": "see `incus list` on its host",
}


class Transport:
    """How to reach one destination."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.ssh = SshConnection(destination.ssh, destination.name) if destination.ssh is not None else None

    @property
    def name(self) -> str:
        """The destination as the user wrote it."""
        return self.destination.name

    def open(self) -> None:
        """Make sure that the shared connection is there.

        Raises:
            HostUnreachableError: it cannot be made.
        """
        if self.ssh is not None:
            self.ssh.open()

    def shell_command(self) -> list[str]:
        """The command line of a POSIX shell at the destination that reads commands from its stdin."""
        inside = [_ENTER[hop.kind].format(name=hop.name) for hop in self.destination.containers]
        words = _nested(inside)
        if self.ssh is not None:
            return self.ssh.command(f"exec {words}")
        program = words.split()[0]
        if shutil.which(program) is None:
            raise UsageError(
                f"{self.name}: {program} is not installed here", fix=f"install it, or --on HOST,{self.name}"
            )
        return words.split()

    def not_a_shell(self, said: str) -> HostUnreachableError:
        """The error for a destination that ran no shell, from what it printed instead."""
        container = self.destination.container
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        detail = lines[-1][:200] if lines else "it printed nothing"
        if container is not None and not re.search(r"(?i)session open refused|connection to .* closed", said):
            fix = _FIXES[container.kind].format(name=container.name)
            return HostUnreachableError(f"{self.name}: the container cannot be entered: {detail}", fix=fix)
        return HostUnreachableError(
            f"{self.name}: no POSIX shell could be started there: {detail}",
            fix="the login must allow commands: `ssh HOST exec sh` must give a shell",
        )


def _nested(inside: list[str]) -> str:
    """``docker exec -i a lxc-attach -n b -- sh``: each tool runs the next one in place of its shell."""
    words = "sh"
    for command in reversed(inside):
        words = command.removesuffix("sh") + words
    return words
