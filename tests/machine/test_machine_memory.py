"""Host memory on recorded machines: control groups of both versions, nested, in containers, with page cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.machine.facts import load_facts, read_facts, to_json
from forebay.machine.interface import GpuReading
from forebay.machine.local import LocalMachine
from forebay.machine.memory import limits, memory_events, read_memory
from forebay.machine.recorded import RecordedMachine

GIB = 2**30
MEMINFO = (
    "MemTotal:       16777216 kB\nMemFree:  1048576 kB\nMemAvailable:    8388608 kB\nSwapTotal: 4 kB\nSwapFree: 2 kB\n"
)


def machine(folder: Path, files: dict[str, str], looks: dict[str, object] | None = None) -> RecordedMachine:
    for path, text in {"/proc/meminfo": MEMINFO, **files}.items():
        target = folder / "files" / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (folder / "looks.json").write_text(json.dumps(looks or {}))
    return RecordedMachine(folder)


def test_without_a_control_group_mem_available_counts(tmp_path: Path) -> None:
    memory = read_memory(machine(tmp_path, {}))
    assert (memory.available_bytes, memory.cgroup, memory.shm, memory.numa_nodes) == (8 * GIB, None, None, ())


def v2(folder: str, limit: int | str, usage: int, cache: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n",
    }


def test_page_cache_of_the_group_counts_as_room(tmp_path: Path) -> None:
    files = {"/proc/self/cgroup": "0::/box\n", **v2("/sys/fs/cgroup/box", 6 * GIB, 5 * GIB, 3 * GIB)}
    memory = read_memory(machine(tmp_path, files))
    assert memory.cgroup is not None
    assert (memory.cgroup.version, memory.available_bytes) == (2, 4 * GIB)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/pod/box\n",
        **v2("/sys/fs/cgroup/pod/box", "max", GIB, 0),
        **v2("/sys/fs/cgroup/pod", 3 * GIB, 2 * GIB, 0),
    }
    memory = read_memory(machine(tmp_path, files))
    assert memory.cgroup is not None
    assert (memory.cgroup.path, memory.available_bytes) == ("/sys/fs/cgroup/pod", GIB)


def test_in_a_container_the_mounts_root_is_our_group(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup is the host's and is not there; the limit is at the root of the mount."""
    files = {"/proc/self/cgroup": "0::/docker/abc\n", **v2("/sys/fs/cgroup", 2 * GIB, GIB, 0)}
    assert read_memory(machine(tmp_path, files)).available_bytes == GIB


def test_version_1_limits_and_its_way_to_say_none(tmp_path: Path) -> None:
    base = "/sys/fs/cgroup/memory/box"
    files = {
        "/proc/self/cgroup": "4:memory,cpu:/box\n3:pids:/x\n",
        f"{base}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{base}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{base}/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        "/sys/fs/cgroup/memory/memory.stat": "",
    }
    memory = read_memory(machine(tmp_path, files))
    assert memory.cgroup is not None
    assert (memory.cgroup.version, memory.available_bytes) == (1, 2 * GIB)


def test_the_groups_own_record_of_kills(tmp_path: Path) -> None:
    files = {
        "/proc/77/cgroup": "0::/box\n",
        "/sys/fs/cgroup/box/memory.events": "low 0\nhigh 3\nmax 9\noom 2\noom_kill 1\n",
    }
    events = memory_events(machine(tmp_path, files), 77)
    assert [(event.path, event.oom_kill, event.high) for event in events] == [("/sys/fs/cgroup/box", 1, 3)]


def test_limits_by_their_kernel_names(tmp_path: Path) -> None:
    text = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1024                 524288               files     \n"
        "Max locked memory         unlimited            unlimited            bytes     \n"
    )
    assert limits(machine(tmp_path, {"/proc/self/limits": text})) == {"Max open files": 1024, "Max locked memory": None}


def test_numa_nodes_and_shared_memory(tmp_path: Path) -> None:
    base = "/sys/devices/system/node"
    files = {f"{base}/node{n}/meminfo": f"Node {n} MemTotal: {n + 1} kB\nNode {n} MemFree: 1 kB\n" for n in (0, 1)}
    looks = {
        "list": {base: ["node1", "node0", "possible"]},
        "space": {"/dev/shm": {"total_bytes": 64, "free_bytes": 32}},
    }
    memory = read_memory(machine(tmp_path, files, looks))
    assert [(node.index, node.total_bytes) for node in memory.numa_nodes] == [(0, 1024), (1, 2048)]
    assert memory.shm is not None
    assert memory.shm.free_bytes == 32


def test_facts_survive_the_file_they_travel_in(tmp_path: Path) -> None:
    gpu = GpuReading(0, "GPU-1", "H200", 141 * 10**9, 140 * 10**9, {123: 5}, "9.0", "570")
    looks = {"gpus": [{**{k: getattr(gpu, k) for k in gpu.__slots__}, "processes": {"123": 5}}], "now": 5.0}
    facts = read_facts(machine(tmp_path / "m", {"/proc/cpuinfo": "processor : 0\nprocessor : 1\n"}, looks))
    assert (facts.cpus, facts.gpus) == (2, (gpu,))
    path = tmp_path / "machine.json"
    path.write_text(to_json(facts))
    assert load_facts(path) == facts


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"schema": 1, "name": 3}'])
def test_a_file_that_is_no_machine_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is no machine file") as caught:
        load_facts(path)
    assert "\n" not in caught.value.message


def test_this_machine_can_be_read() -> None:
    memory = read_memory(LocalMachine())
    assert 0 < memory.available_bytes <= memory.total_bytes
