"""hosts.toml: names for hosts, settings of a host, and groups.

    [hosts.gpu1]
    on = "root@pve,lxc:101"          # what --on takes; without it the name itself, an alias of ~/.ssh/config
    python = "/opt/vllm/bin/python"  # the Python that runs Forebay's helper there (3.10 or newer)
    home = "/data/forebay"           # FOREBAY_HOME there
    env = { HF_HOME = "/data/hf" }   # variables of the servers started there

    [groups]
    pod1 = ["gpu1", "gpu2"]

The file is ``$FOREBAY_HOSTS``, else ``~/.config/forebay/hosts.toml``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import UsageError

__all__ = ["HostSettings", "HostsFile", "hosts_path", "load_hosts"]

_KEYS = {"on", "python", "home", "cache", "env", "address"}


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of one host. ``address``: how the other hosts reach it, for servers over several hosts."""

    on: str | None = None
    python: str | None = None
    home: str | None = None
    cache: str | None = None
    address: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostsFile:
    """The hosts and groups of a hosts.toml; empty where there is none."""

    hosts: Mapping[str, HostSettings] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def hosts_path() -> Path:
    """Where hosts.toml is looked for."""
    given = os.environ.get("FOREBAY_HOSTS")
    return Path(given) if given else Path.home() / ".config" / "forebay" / "hosts.toml"


def load_hosts(path: Path | None = None) -> HostsFile:
    """Read hosts.toml.

    Raises:
        UsageError: it cannot be read, or an entry is wrong; the message names the file and the entry.
    """
    path = path or hosts_path()
    try:
        with path.open("rb") as source:
            data = tomllib.load(source)
    except FileNotFoundError:
        return HostsFile()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}", fix="see the section on other machines in docs/operate.md") from error
    unknown = set(data) - {"hosts", "groups"}
    if unknown:
        raise _wrong(path, f"unknown table {sorted(unknown)[0]!r}", "use [hosts.NAME] and [groups]")
    hosts = {name: _host(path, name, entry) for name, entry in _table(path, data, "hosts").items()}
    groups = {name: _group(path, name, entry) for name, entry in _table(path, data, "groups").items()}
    return HostsFile(hosts, groups)


def _table(path: Path, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = data.get(name, {})
    if not isinstance(table, dict):
        raise _wrong(path, f"{name} is not a table", f"write [{name}]")
    return table


def _host(path: Path, name: str, entry: Any) -> HostSettings:
    where = f"[hosts.{name}]"
    if not isinstance(entry, dict):
        raise _wrong(path, f"{where} is not a table", 'write on = "user@host"')
    unknown = set(entry) - _KEYS
    if unknown:
        raise _wrong(path, f"{where}: unknown key {sorted(unknown)[0]!r}", f"known keys: {', '.join(sorted(_KEYS))}")
    for key in _KEYS - {"env"}:
        if key in entry and not (isinstance(entry[key], str) and entry[key]):
            raise _wrong(path, f"{where}: {key} is not a text", f'write {key} = "..."')
    env = entry.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise _wrong(path, f"{where}: env is not a table of texts", 'write env = { NAME = "value" }')
    return HostSettings(**{**entry, "env": dict(env)})


def _group(path: Path, name: str, entry: Any) -> tuple[str, ...]:
    if not isinstance(entry, list) or not entry or not all(isinstance(item, str) for item in entry):
        raise _wrong(path, f"groups.{name} is not a list of hosts", f'write {name} = ["gpu1", "gpu2"]')
    return tuple(entry)


def _wrong(path: Path, text: str, fix: str) -> UsageError:
    return UsageError(f"{path}: {text}", fix=fix)
