"""What is special about a container: its kind, whose /proc/meminfo it shows, capabilities, device nodes, pid 1, and
advice that fits where the container is configured (docker, LXC, Proxmox).

Sources: the variable ``container`` in the environment of pid 1 (systemd's Container Interface), /.dockerenv and
/run/.containerenv, /proc/self/mountinfo (lxcfs), /proc/self/status (CapEff, capabilities(7)), /proc/self/uid_map.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forebay.machine.interface import Machine
from forebay.machine.processes import ProcessInfo

__all__ = [
    "CONTAINER_FILES",
    "ContainerFacts",
    "ContainerNeed",
    "advice",
    "device_problems",
    "has_ipc_lock",
    "read_container",
    "unreaped_zombies",
]

CONTAINER_FILES = (
    "/proc/1/environ", "/proc/1/comm", "/proc/1/cgroup", "/proc/self/mountinfo", "/proc/self/status",
    "/proc/self/uid_map", "/run/.containerenv", "/.dockerenv", "/proc/driver/nvidia/version",
)  # fmt: skip
_CAP_IPC_LOCK = 14
_INITS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "runit", "runsvdir", "bash")
_DRIVER = "/proc/driver/nvidia/version"
_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """The container that the reading process is in.

    Attributes:
        kind: ``lxc``, ``docker``, ``podman``, ``kubernetes`` or another name of the container manager.
        lxcfs: /proc/meminfo shows the container's memory (lxcfs), not the host's.
        unprivileged: its root is an ordinary user of the host.
        ipc_lock: CAP_IPC_LOCK is effective: pinned memory is not limited by ``ulimit -l``.
        init: name of pid 1; ``reaps``: whether pid 1 is an init that reaps orphans.
    """

    kind: str
    lxcfs: bool
    unprivileged: bool
    ipc_lock: bool
    init: str
    reaps: bool


class ContainerNeed(StrEnum):
    """What a container may have too little of."""

    MEMORY = "memory"
    SHM = "shm"
    MEMLOCK = "memlock"
    DEVICES = "devices"
    REAPER = "reaper"


def read_container(machine: Machine) -> ContainerFacts | None:
    """The container the machine is; None on a host."""
    kind = _kind(machine)
    if kind is None:
        return None
    init = _read(machine, "/proc/1/comm").strip()
    mounts = _read(machine, "/proc/self/mountinfo")
    return ContainerFacts(
        kind=kind,
        lxcfs=bool(re.search(r"(?m) /proc/meminfo .* - fuse\.lxcfs ", mounts)),
        unprivileged=_is_unprivileged(machine),
        ipc_lock=has_ipc_lock(machine),
        init=init,
        reaps=init in _INITS,
    )


def has_ipc_lock(machine: Machine) -> bool:
    """Whether CAP_IPC_LOCK is effective for the reading process."""
    match = re.search(r"(?m)^CapEff:\s*([0-9a-fA-F]+)", _read(machine, "/proc/self/status"))
    return bool(match and int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def device_problems(machine: Machine) -> list[str]:
    """GPU device nodes that are missing or may not be opened although the driver is loaded; empty where all is well.

    In a container the driver of the host is visible in /proc while a node was not created, or a device rule of the
    control group denies it.
    """
    try:
        machine.read(_DRIVER)
    except OSError:
        return []
    problems = []
    for path in _GPU_NODES:
        try:
            machine.stat(path)
        except OSError:
            problems.append(f"{path} does not exist")
            continue
        opened = machine.run(("sh", "-c", ': <"$1"', "sh", path), timeout_s=5.0)
        if opened.exit_code != 0:
            said = (opened.stderr.strip().splitlines() or ["it cannot be opened"])[-1].rpartition(": ")[2]
            problems.append(f"{path} cannot be opened: {said}")
    return problems


def unreaped_zombies(processes: Iterable[ProcessInfo], facts: ContainerFacts | None) -> list[ProcessInfo]:
    """Zombies whose parent is a pid 1 that reaps nobody (a container without an init).

    They stay until it is restarted.
    """
    if facts is None or facts.reaps:
        return []
    return [info for info in processes if info.is_zombie and info.ppid == 1]


def advice(need: ContainerNeed, facts: ContainerFacts | None, *, names: Sequence[str] = ()) -> str:
    """How to get more of ``need``, for where the machine is.

    ``names``: the containers by which it was reached, if known.
    """
    kind = facts.kind if facts is not None else "host"
    name = names[-1].partition(":")[2] if names else "NAME"
    if kind in ("docker", "podman"):
        return _DOCKER[need].format(kind=kind, name=name)
    if kind == "lxc":
        return _LXC[need].format(name=name)
    if kind == "kubernetes":
        return _KUBERNETES[need]
    return _HOST[need]


_HOST = {
    ContainerNeed.MEMORY: "free memory on this host, or raise the limit of its control group (systemd: MemoryMax=)",
    ContainerNeed.SHM: "mount -o remount,size=64G /dev/shm",
    ContainerNeed.MEMLOCK: "ulimit -l unlimited (/etc/security/limits.conf, or LimitMEMLOCK=infinity of the service)",
    ContainerNeed.DEVICES: "load the modules: nvidia-modprobe -u -c=0",
    ContainerNeed.REAPER: "end the parent of the zombie",
}
_DOCKER = {
    ContainerNeed.MEMORY: "on its host: `{kind} update --memory 64g --memory-swap 64g {name}`",
    ContainerNeed.SHM: "start the container with --shm-size 64g (or --ipc=host); it cannot be changed while it runs",
    ContainerNeed.MEMLOCK: "start the container with --ulimit memlock=-1 (or --cap-add IPC_LOCK)",
    ContainerNeed.DEVICES: "start the container with --gpus all (needs the NVIDIA container toolkit on its host)",
    ContainerNeed.REAPER: "start the container with --init; until then `{kind} restart {name}` removes the zombies",
}
_LXC = {
    ContainerNeed.MEMORY: "on its host: `pct set {name} --memory 65536` (Proxmox), else lxc.cgroup2.memory.max",
    ContainerNeed.SHM: "in its configuration (/etc/pve/lxc/{name}.conf on Proxmox): "
    "`lxc.mount.entry: tmpfs dev/shm tmpfs rw,nosuid,nodev,size=64G,create=dir 0 0`, then `pct reboot {name}`",
    ContainerNeed.MEMLOCK: "in its configuration: `lxc.prlimit.memlock: unlimited`, then `pct reboot {name}`",
    ContainerNeed.DEVICES: "in its configuration: `lxc.cgroup2.devices.allow: c 195:* rwm`, the same for the major "
    "number of nvidia-uvm (/proc/devices on its host), and an `lxc.mount.entry` for each node; then restart it",
    ContainerNeed.REAPER: "restart the container (`pct reboot {name}`)",
}
_KUBERNETES = {
    ContainerNeed.MEMORY: "raise resources.limits.memory of the pod",
    ContainerNeed.SHM: "mount an emptyDir with medium: Memory at /dev/shm",
    ContainerNeed.MEMLOCK: "add IPC_LOCK to securityContext.capabilities",
    ContainerNeed.DEVICES: "ask for nvidia.com/gpu in resources.limits",
    ContainerNeed.REAPER: "set shareProcessNamespace: true, or use an image with an init",
}


def _kind(machine: Machine) -> str | None:
    environment = _read(machine, "/proc/1/environ").split("\0")
    named = next((item.partition("=")[2] for item in environment if item.startswith("container=")), "")
    cgroup = _read(machine, "/proc/1/cgroup")
    if any(item.startswith("KUBERNETES_SERVICE_HOST=") for item in environment) or "kubepods" in cgroup:
        return "kubernetes"
    if named:
        return {"lxc-libvirt": "lxc"}.get(named, named)
    if _exists(machine, "/run/.containerenv"):
        return "podman"
    if _exists(machine, "/.dockerenv") or re.search(r"/docker[/-]", cgroup):
        return "docker"
    if re.search(r"(?m)/lxc(?:\.payload)?[./]", cgroup):
        return "lxc"
    return None


def _is_unprivileged(machine: Machine) -> bool:
    """The whole range of uids maps to itself on a host and in a privileged container."""
    rows = _read(machine, "/proc/self/uid_map").split()
    return bool(rows) and rows[:3] != ["0", "0", "4294967295"]


def _read(machine: Machine, path: str) -> str:
    try:
        return machine.read(path)
    except OSError:
        return ""


def _exists(machine: Machine, path: str) -> bool:
    try:
        machine.read_bytes(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True
