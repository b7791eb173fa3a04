"""The one formula for available memory, on recorded machines of every kind and held against a real control group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from real_cgroup import fill_with_page_cache, on_a_disk, real_cgroup

from forebay.engine.cache.host import pool_check
from forebay.engine.cache.host.pool_check import read_host_limits
from forebay.hostmemory.available import AvailableMemory, read_available_memory
from forebay.machine.recorded import RecordedMachine
from forebay.operation.start.preflight import baseline
from forebay.planning.make_plan import PlanOptions, make_plan

MIB, GIB = 2**20, 2**30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 25165824 kB\n"


def v2(
    folder: str, limit: int | str, usage: int, inactive: int, active: int, high: int | str = "max"
) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\nfile 7\nshmem 9\ninactive_file {inactive}\nactive_file {active}\n",
    }


def v1(folder: str, limit: int, usage: int, inactive: int, active: int) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": "inactive_file 1\nactive_file 1\n"
        f"total_inactive_file {inactive}\ntotal_active_file {active}\n",
    }


CASES: dict[str, tuple[dict[str, str], int]] = {
    "no group": ({}, 24 * GIB),
    "version 2": (
        {"/proc/self/cgroup": "0::/box\n", **v2("/sys/fs/cgroup/box", 16 * GIB, 12 * GIB, GIB, 6 * GIB)},
        11 * GIB,
    ),
    "version 2, slowed down before it is killed": (
        {"/proc/self/cgroup": "0::/box\n", **v2("/sys/fs/cgroup/box", "max", 12 * GIB, GIB, 6 * GIB, high=14 * GIB)},
        9 * GIB,
    ),
    "version 2, nested": (
        {
            "/proc/self/cgroup": "0::/pod/box\n",
            **v2("/sys/fs/cgroup/pod/box", 16 * GIB, 2 * GIB, 0, GIB),
            **v2("/sys/fs/cgroup/pod", 8 * GIB, 7 * GIB, GIB, 2 * GIB),
            **v2("/sys/fs/cgroup", "max", 9 * GIB, 0, 0),
        },
        4 * GIB,
    ),
    "version 2, in a container": (
        {"/proc/self/cgroup": "0::/../../docker/abc\n", **v2("/sys/fs/cgroup", 8 * GIB, 5 * GIB, 0, GIB)},
        4 * GIB,
    ),
    "version 1": (
        {
            "/proc/self/cgroup": "4:cpu,memory:/box\n",
            **v1("/sys/fs/cgroup/memory/box", 16 * GIB, 12 * GIB, GIB, 6 * GIB),
        },
        11 * GIB,
    ),
    "version 1, nested": (
        {
            "/proc/self/cgroup": "4:memory:/pod/box\n0::/\n",
            **v1("/sys/fs/cgroup/memory/pod/box", 16 * GIB, 2 * GIB, 0, GIB),
            **v1("/sys/fs/cgroup/memory/pod", 8 * GIB, 7 * GIB, GIB, 2 * GIB),
            **v1("/sys/fs/cgroup/memory", 2**63 - 4096, 9 * GIB, 0, 0),
        },
        4 * GIB,
    ),
    "both versions, memory in version 2": (
        {
            "/proc/self/cgroup": "4:cpu:/box\n0::/box\n",
            **v2("/sys/fs/cgroup/unified/box", 16 * GIB, 12 * GIB, GIB, 6 * GIB),
        },
        11 * GIB,
    ),
    "full": ({"/proc/self/cgroup": "0::/box\n", **v2("/sys/fs/cgroup/box", 4 * GIB, 5 * GIB, 0, 0)}, 0),
}


def recorded(folder: Path, files: dict[str, str]) -> RecordedMachine:
    for path, text in {"/proc/meminfo": MEMINFO, **files}.items():
        target = folder / "files" / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (folder / "looks.json").write_text(json.dumps({"now": 0.0}))
    return RecordedMachine(folder)


@pytest.mark.parametrize("name", CASES)
def test_planner_preflight_and_engine_read_the_same_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, expected = CASES[name]
    machine = recorded(tmp_path, files)

    def read_here(read: Callable[[str], str] | None = None) -> AvailableMemory:
        return read_available_memory(machine.read)

    monkeypatch.setattr(pool_check, "read_available_memory", read_here)
    host = make_plan(PlanOptions("smollm2"), machine).host
    assert host is not None
    by_planner = host.available_bytes
    by_preflight = baseline(machine, []).host_available_bytes
    assert (by_planner, by_preflight, read_host_limits().available) == (expected, expected, expected)


TOUCH = """
    import mmap, sys
    count = int(sys.argv[1])
    memory = mmap.mmap(-1, count)
    for offset in range(0, count, 4096):
        memory[offset] = 1
    print("all of it")
"""

AVAILABLE = """
    import sys
    from forebay.hostmemory.available import read_available_memory
    print(read_available_memory().available_bytes)
"""


def test_page_cache_of_a_real_group_is_room_to_the_last_megabytes(tmp_path: Path) -> None:
    """A process can have what the formula says, and is killed beyond it: active page cache counts,
    and nothing is left out.
    """
    path = on_a_disk(tmp_path) / "checkpoint-of-a-test"
    with real_cgroup(300 * MIB) as group:
        try:
            fill_with_page_cache(group, path, 180 * MIB)
            said = int(group.run(AVAILABLE).stdout)
            # The interpreter that reads and the one that allocates take 5 to 15 MiB of it themselves.
            assert 270 * MIB < said <= 300 * MIB
            fill_with_page_cache(group, path, 180 * MIB)
            inside = group.run(TOUCH, str(said - 20 * MIB))
            assert (inside.returncode, inside.stdout.strip()) == (0, "all of it")
            fill_with_page_cache(group, path, 180 * MIB)
            assert group.run(TOUCH, str(said + 20 * MIB)).returncode == -9
        finally:
            path.unlink(missing_ok=True)


PLAN_THEN_ALLOCATE = """
    import json, subprocess, sys
    from forebay.engine.cache.host.pool_check import require_host_pool
    from forebay.engine.cache.host.region import HostRegion
    from forebay.machine.local import LocalMachine
    from forebay.machine.memory import read_memory

    command = [sys.executable, "-c", "from forebay.cli.main import main; main()"]
    ask = [*command, "plan", "smollm2", "--json", "--device-cache", "16MB"]
    plan = json.loads(subprocess.run(ask, capture_output=True, text=True, check=False).stdout)
    largest = plan["host"]["largest_safe_per_rank_bytes"]
    available = read_memory(LocalMachine()).available_bytes
    verdict = require_host_pool(largest)
    region = HostRegion.create([largest // 4096 - 1], [4096])
    region.fault_in()
    print(json.dumps({"largest": largest, "by_machine": available, "by_engine": verdict.limits.available}))
"""


def test_what_plan_calls_safe_is_accepted_by_the_engine_and_really_there(tmp_path: Path) -> None:
    """In one real group, full of active page cache: plan, engine and the kernel agree."""
    path = on_a_disk(tmp_path) / "checkpoint-of-a-test"
    with real_cgroup(1500 * MIB) as group:
        try:
            fill_with_page_cache(group, path, 700 * MIB)
            done = group.run(PLAN_THEN_ALLOCATE)
            assert done.returncode == 0, done.stderr
            numbers = json.loads(done.stdout)
            assert abs(numbers["by_machine"] - numbers["by_engine"]) < 16 * MIB
            # 1,500 MiB less weights, device pool, reserve and processes; by inactive pages alone it would be nothing.
            assert 500 * MIB < numbers["largest"] < 760 * MIB
        finally:
            path.unlink(missing_ok=True)
