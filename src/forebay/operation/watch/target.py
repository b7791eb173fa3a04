"""From what a user names (a run, or an address) to a server, its processes and its log."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import UsageError
from forebay.machine.interface import Machine
from forebay.machine.ports import listeners
from forebay.machine.processes import ProcessId, boot_id, identify, read_process
from forebay.runs.run_record import Run, open_run
from forebay.servers.base import Server
from forebay.servers.http_client import Address, parse_address, send
from forebay.servers.log_patterns import GRAMMARS, detect_server, parse_segments
from forebay.servers.registry import server_named, server_of_command, server_of_models

__all__ = ["Target", "guess_server", "listener_argv", "target_of"]

_LOG_HEAD_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Target:
    """The server a command is about.

    ``api_server`` None: the listener, whoever that is. ``run`` None: Forebay did not start it.
    """

    address: Address
    api_server: ProcessId | None
    log: str | None
    server: str | None
    run: Run | None = None


def target_of(
    machine: Machine,
    name: str,
    *,
    pid: int | None = None,
    log: str | None = None,
    server: str | None = None,
    api_key: str = "",
) -> Target:
    """Read NAME|URL.

    Raises:
        UsageError: no run of that name, no address, or no process ``pid``.
    """
    if "/" in name or ":" in name:
        api_server = None
        if pid is not None:
            api_server = identify(machine, pid)
            if api_server is None and log is None:
                raise UsageError(
                    f"--pid {pid}: there is no such process", fix="leave --pid out to look for the listener"
                )
            if api_server is None:  # it has died already; its log may say of what
                api_server = ProcessId(pid, -1, boot_id(machine))
        return Target(parse_address(name, api_key), api_server, log, server)
    run = open_run(name)
    record = run.read()
    return Target(parse_address(record.url, api_key), record.api_server, log or str(run.log_path), record.server, run)


def guess_server(machine: Machine, target: Target) -> Server:
    """Which server program it is: as named, by its process's command line, its log or its /v1/models;
    else ``unknown``.
    """
    if target.server is not None:
        return server_named(target.server)
    pids = [target.api_server.pid] if target.api_server is not None else _listening_pids(machine, target.address)
    for pid in pids:
        info = read_process(machine, pid)
        found = server_of_command(info.command) if info is not None else None
        if found is not None:
            return server_named(found)
    if target.log is not None:
        found = _server_from_log(machine, target.log)
        if found is not None:
            return server_named(found)
    answer = send(machine, target.address, "GET", "/v1/models", timeout_s=2.0)
    return server_named(server_of_models(answer) or "unknown")


def listener_argv(machine: Machine, address: Address) -> tuple[str, ...]:
    """The command line of the process that listens at ``address``; empty where it cannot be seen."""
    for pid in _listening_pids(machine, address):
        info = read_process(machine, pid)
        if info is not None and info.cmdline:
            return info.cmdline
    return ()


def _listening_pids(machine: Machine, address: Address) -> list[int]:
    if not address.is_local:
        return []
    return sorted({pid for item in listeners(machine, address.port) for pid in item.pids})


def _server_from_log(machine: Machine, path: str) -> str | None:
    try:
        text = machine.read_bytes(path, limit=_LOG_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    lines = [part for number, line in enumerate(text.split("\n"), 1) for part in parse_segments(number, line)]
    found = detect_server(lines)
    return found if found in GRAMMARS else None
