"""What a log and its user say about the launch and the machine: versions, flags, ranks, memory. A fact that is not there is None."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forebay.machine.facts import MachineFacts
from forebay.servers.log_patterns import LogLine

__all__ = ["HostFacts", "LaunchFacts", "host_facts_of", "read_launch"]

_VERSIONS = (
    (
        "vllm",
        re.compile(
            r"\bvLLM API server version v?(\d[\w.+]*)|\bInitializing an? (?:V\d )?LLM engine \(v(\d[\w.+]*)\)|\bvllm==(\d[\w.]*)"
        ),
    ),
    (
        "sglang",
        re.compile(r"\bsglang(?: version[:=]? *|==| v)(\d[\w.+]*)|\bsglang-(\d[\w.]*)\.dist-info", re.IGNORECASE),
    ),
    ("lmcache", re.compile(r"\blmcache(?: version[:=]? *|==| v)(\d[\w.+]*)", re.IGNORECASE)),
    ("torch", re.compile(r"\btorch==(\d[\w.+]*)|PyTorch version: (\d[\w.+]*)")),
)
_COMMAND = re.compile(
    r"\b(?:sglang[./]launch_server|sglang serve|vllm serve|vllm\.entrypoints\.openai\.api_server|launch_server\.py)\b(?P<rest>.*)"
)
_FLAG = re.compile(
    r"(?<!\S)--(?P<name>[a-z][a-z0-9_-]*)(?:[= ]+(?P<value>(?!-)\S+))?|(?<!\S)-(?P<short>tp|dp|pp|cp|ep)[= ]+(?P<count>\d+)"
)
_NAMES = {
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "pp": "pp_size",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
}
_WORLD = re.compile(r"\bworld_size=(?P<world>\d+)\b.*\brank=\d+|\bnRanks (?P<world2>\d+)\b")
_PLATFORMS = (
    (
        "Ascend NPU",
        re.compile(r"\btorch_npu\b|\bNPU out of memory|\bAscend\b|\bHCCL\b|\baclrt|\bACL (?:error|stream)|vllm_ascend"),
    ),
    (
        "AMD GPU (ROCm)",
        re.compile(
            r"\bHIP (?:error|out of memory)|\bROCm\b|\bhip(?:Error|HostRegister|Malloc)|\bRCCL\b|\bMI3\d\d\w?\b|\bgfx9\d\d\b"
        ),
    ),
    (
        "Intel XPU",
        re.compile(
            r"\bXPU out of memory|\bintel_extension_for_pytorch\b|\bxpu:\d|UR_RESULT_ERROR|\boneCCL\b|level[- ]zero",
            re.IGNORECASE,
        ),
    ),
    ("Moore Threads GPU", re.compile(r"\bMUSA (?:error|out of memory)|\btorch_musa\b")),
    ("TPU", re.compile(r"\btpu_worker\b|\btorch_xla\b|libtpu")),
)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known of the machine that the log is from. None: not known.

    Attributes:
        host_memory_bytes: memory of the host (or of the container's limit); host_available_bytes: free for a new process.
        gpu_bytes: memory of each GPU.
        shm_bytes: size of /dev/shm.
        memlock_bytes: limit of locked memory; -1 where there is none.
        source: where it comes from, for the evidence.
    """

    host_memory_bytes: int | None = None
    host_available_bytes: int | None = None
    gpu_bytes: tuple[int, ...] = ()
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    source: str = "given"

    @property
    def known(self) -> bool:
        """Something is known."""
        return bool(self.host_memory_bytes or self.gpu_bytes or self.shm_bytes or self.memlock_bytes)


def host_facts_of(machine: MachineFacts) -> HostFacts:
    """What counts of a machine that was read: its memory with the limits of its control group, GPUs, /dev/shm."""
    memory = machine.memory
    limits = [memory.total_bytes] + ([memory.cgroup.limit_bytes] if memory.cgroup and memory.cgroup.limit_bytes else [])
    return HostFacts(
        host_memory_bytes=min(limits),
        host_available_bytes=memory.available_bytes,
        gpu_bytes=tuple(gpu.total_bytes for gpu in machine.gpus),
        shm_bytes=memory.shm.total_bytes if memory.shm else None,
        memlock_bytes=-1 if memory.memlock_bytes is None else memory.memlock_bytes,
        source=machine.name,
    )


@dataclass(slots=True)
class LaunchFacts:
    """What the log says about the launch.

    Attributes:
        versions: package -> version, as printed.
        asked: flags and their values as the server or the command in the log names them (``tp_size``, ``hicache_ratio``).
        world_size: number of ranks as a line of the log states it; None where none does.
        platform: accelerator vendor, where it is not NVIDIA; empty where not known.
    """

    versions: dict[str, str] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None
    platform: str = ""

    @property
    def ranks(self) -> int | None:
        """Ranks of one replica on all hosts: asked for, or stated by the log. None where neither is there: ranks are never counted
        from the ones that happened to write a line."""
        tp = self.number("tp_size")
        pp = self.number("pp_size") or 1
        return tp * pp if tp else self.world_size

    @property
    def ranks_per_host(self) -> int | None:
        """The ranks that share one host's memory."""
        ranks, hosts = self.ranks, self.number("nnodes") or 1
        return max(ranks // hosts, 1) if ranks else None

    def number(self, name: str) -> int | None:
        """A flag as a whole number, or None."""
        value = self.asked.get(name, "")
        return int(value) if value.isdigit() else None

    def decimal(self, name: str) -> float | None:
        """A flag as a number, or None."""
        try:
            return float(self.asked.get(name, ""))
        except ValueError:
            return None


def read_launch(lines: Iterable[LogLine], asked: Mapping[str, str]) -> LaunchFacts:
    """Read the facts of the launch.

    Args:
        lines: the kept lines of all sources.
        asked: what the server printed of its own settings; it counts more than a command line in the log.
    """
    facts = LaunchFacts()
    for line in lines:
        text = line.full
        if "ersion" in text or "LLM engine" in text or "==" in text or "-info" in text:
            _read_versions(text, facts)
        if facts.world_size is None and ("world_size=" in text or "nRanks" in text):
            found = _WORLD.search(text)
            facts.world_size = int(found["world"] or found["world2"]) if found else None
        command = _COMMAND.search(text) if "sglang" in text or "vllm" in text or "launch_server" in text else None
        if command:
            for name, value in _flags(command["rest"]):
                facts.asked.setdefault(name, value)
        if not facts.platform:
            facts.platform = next((name for name, mark in _PLATFORMS if mark.search(text)), "")
    for name, value in asked.items():
        facts.asked[_NAMES.get(name, name)] = value
    return facts


def _read_versions(text: str, facts: LaunchFacts) -> None:
    for package, version in _VERSIONS:
        found = version.search(text)
        if found and package not in facts.versions:
            facts.versions[package] = next(group for group in found.groups() if group)


def _flags(text: str) -> Iterable[tuple[str, str]]:
    for found in _FLAG.finditer(text):
        name = (found["name"] or found["short"]).replace("-", "_")
        yield _NAMES.get(name, name), found["value"] or found["count"] or "true"
