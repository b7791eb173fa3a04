"""What ``--on`` names: hosts over SSH, containers on this machine or on a host, groups of hosts.toml.

    gpu1                    an alias of ~/.ssh/config, or a host of hosts.toml
    user@host:2222          user, address and port; IPv6 as user@[::1]:2222
    root@pve,lxc:101        the container 101 on the host pve
    docker:vllm             a container on this machine
    host1,host2             two hosts
    pod1                    a group of hosts.toml

A container follows the host it is on after a comma; any other part after a comma is a further host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.errors import UsageError
from forebay.remote.hosts_file import HostSettings, HostsFile

__all__ = ["CONTAINER_KINDS", "ContainerHop", "Destination", "SshHop", "parse_destinations"]

CONTAINER_KINDS = ("lxc", "pct", "docker", "podman", "incus")
# No character of these means anything to a shell or to ssh's own % and $ expansion.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.\-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-+@\\]*")
_CONTAINER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_EXAMPLE = "write an alias of ~/.ssh/config, user@host, user@host:port, or HOST,lxc:NAME"


@dataclass(frozen=True, slots=True)
class SshHop:
    """A host reached by ``ssh``. ``user`` and ``port`` None: as ~/.ssh/config says."""

    host: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port is not None else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port is not None else "")


@dataclass(frozen=True, slots=True)
class ContainerHop:
    """A container, entered by the tool of its kind."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Destination:
    """One machine: an SSH host, a container on it, or a container on this machine. ``name`` is what the user wrote."""

    name: str
    ssh: SshHop | None
    containers: tuple[ContainerHop, ...] = ()
    settings: HostSettings = field(default_factory=HostSettings)

    @property
    def container(self) -> ContainerHop | None:
        """The innermost container; None for a host itself."""
        return self.containers[-1] if self.containers else None


def parse_destinations(texts: Sequence[str], hosts: HostsFile) -> list[Destination]:
    """Read the values of ``--on``.

    Raises:
        UsageError: one of them cannot be read, or a host is named twice.
    """
    found: list[Destination] = []
    for text in texts:
        found += _of_text(text, hosts, ())
    names = [destination.name for destination in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--on names {twice!r} twice", fix="name each host once")
    return found


def _of_text(text: str, hosts: HostsFile, groups: tuple[str, ...]) -> list[Destination]:
    found: list[Destination] = []
    for part in text.split(","):
        part = part.strip()
        if part in hosts.groups:
            if part in groups:
                raise UsageError(f"hosts.toml: the group {part!r} contains itself", fix="list hosts in it")
            for member in hosts.groups[part]:
                found += _of_text(member, hosts, (*groups, part))
        elif _is_container(part) and found:
            found[-1] = _inside(found[-1], _container(part))
        elif _is_container(part):
            found.append(Destination(part, None, (_container(part),)))
        else:
            found.append(_host(part, hosts))
    return found


def _host(part: str, hosts: HostsFile) -> Destination:
    settings = hosts.hosts.get(part)
    if settings is None:
        return Destination(part, _ssh(part))
    if settings.on is None:
        return Destination(part, _ssh(part), settings=settings)
    inner = _of_text(settings.on, HostsFile(), ())
    if len(inner) != 1:
        raise UsageError(f"hosts.toml: [hosts.{part}] on = {settings.on!r} names several hosts", fix="use a group")
    return Destination(part, inner[0].ssh, inner[0].containers, settings)


def _inside(outer: Destination, container: ContainerHop) -> Destination:
    name = f"{outer.name},{container}"
    return Destination(name, outer.ssh, (*outer.containers, container), outer.settings)


def _is_container(part: str) -> bool:
    kind, colon, _ = part.partition(":")
    return bool(colon) and kind in CONTAINER_KINDS


def _container(part: str) -> ContainerHop:
    kind, _, name = part.partition(":")
    if not _CONTAINER.fullmatch(name):
        raise UsageError(f"--on {part!r}: {name!r} is not the name of a container", fix=f"write {kind}:NAME")
    return ContainerHop(kind, name)


def _ssh(part: str) -> SshHop:
    user, at, rest = part.rpartition("@")
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", rest)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    else:
        host, port = rest, None
    if not _HOST.fullmatch(host) or (at and not _USER.fullmatch(user)):
        raise UsageError(f"--on {part!r} is not a host", fix=_EXAMPLE)
    if port is not None and not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise UsageError(f"--on {part!r}: {port!r} is not a port (1 to 65535)", fix=_EXAMPLE)
    return SshHop(host, user if at else None, int(port) if port is not None else None)
