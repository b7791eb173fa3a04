"""Which of this machine's processes belong to a run.

A run owns the session it was launched into, the processes on its record (pid, start time and boot id) with their
descendants, and, where asked, every process with the run's id in its environment. A name never decides.
"""

from __future__ import annotations

from forebay.machine.interface import Machine
from forebay.machine.processes import (
    ProcessInfo,
    all_processes,
    boot_id,
    descendants,
    environment,
    read_process,
    session_members,
)
from forebay.runs.run_record import RunRecord

__all__ = ["owned_processes"]


def owned_processes(machine: Machine, record: RunRecord, *, environments: bool = False) -> list[ProcessInfo]:
    """The living processes (and zombies) that belong to the run; empty after a reboot.

    Args:
        environments: also look for the run's id in every process's environment (finds what left the session).
    """
    api_server = record.api_server
    if api_server is None or api_server.boot_id != boot_id(machine):
        return []
    everyone = all_processes(machine)
    by_pid = {info.pid: info for info in everyone}
    owned: dict[int, ProcessInfo] = {}
    for known in [api_server, *record.members]:
        info = by_pid.get(known.pid)
        if info is not None and info.start_ticks == known.start_ticks:
            owned[info.pid] = info
    leader = by_pid.get(api_server.pid)
    if leader is None or leader.start_ticks == api_server.start_ticks:  # else the number leads a stranger's session now
        for info in session_members(everyone, api_server.pid):
            if info.start_ticks >= api_server.start_ticks:
                owned[info.pid] = info
    for pid in list(owned):
        owned.update({info.pid: info for info in descendants(everyone, pid)})
    if environments:
        for info in everyone:
            if info.pid not in owned and (environment(machine, info.pid) or {}).get("FOREBAY_RUN_ID") == record.run_id:
                owned[info.pid] = info
    if record.supervisor is not None:
        owned.pop(record.supervisor.pid, None)
    return [read_process(machine, pid) or info for pid, info in owned.items()]
