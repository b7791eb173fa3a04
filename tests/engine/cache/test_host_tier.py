"""The host region: judged before it is made, shared by ranks, and gone with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from small_tmpfs import Filler, small_tmpfs

from forebay.causes import Cause
from forebay.engine.cache.host.pool_check import HostLimits, judge_host_pool, read_host_limits, require_host_pool
from forebay.engine.cache.host.region import STATUS_BYTES, HostRegion
from forebay.errors import RefusedError
from forebay.sizes import GB


@pytest.mark.parametrize(
    ("asked", "limits", "cause", "largest"),
    [
        (8 * GB, HostLimits(20 * GB, None, 30 * GB), None, 18 * GB),
        (18 * GB, HostLimits(20 * GB, None, 30 * GB), None, 18 * GB),
        (18 * GB + 1, HostLimits(20 * GB, None, 30 * GB), Cause.HOST_POOL_TOO_BIG, 18 * GB),
        (8 * GB, HostLimits(20 * GB, 5 * GB, 30 * GB), Cause.HOST_POOL_TOO_BIG, 3 * GB),
        (8 * GB, HostLimits(20 * GB, None, 64 * 10**6), Cause.SHM_TOO_SMALL, 64 * 10**6),
        # The quota of /dev/shm needs no reserve: memory has it.
        (1 * GB, HostLimits(20 * GB, None, 1 * GB), None, 1 * GB),
        (1 * GB, HostLimits(1 * GB, None, None), Cause.HOST_POOL_TOO_BIG, 0),
        (1 * GB, HostLimits(None, None, None), None, 1 * GB),
    ],
)
def test_the_verdict(asked: int, limits: HostLimits, cause: Cause | None, largest: int) -> None:
    verdict = judge_host_pool(asked, limits, reserve=2 * GB)
    assert (verdict.cause, verdict.largest) == (cause, largest)


def test_a_refusal_has_every_number_and_one_that_works() -> None:
    verdict = judge_host_pool(300 * GB, HostLimits(200 * GB, 150 * GB, 90 * GB), reserve=5 * GB)
    with pytest.raises(RefusedError) as refusal:
        verdict.require()
    assert refusal.value.code == "host_pool_too_big"
    for number in ("300 GB", "200 GB", "150 GB", "90 GB", "5 GB"):
        assert number in refusal.value.message
    assert refusal.value.fix is not None
    assert "--host-cache 90000MB" in refusal.value.fix
    assert judge_host_pool(verdict.largest, verdict.limits, verdict.reserve).cause is None


def test_this_machine_is_read() -> None:
    limits = read_host_limits()
    assert limits.available is not None
    assert 0 < limits.available < 2**50
    with pytest.raises(RefusedError):
        require_host_pool(2**55)


def test_faulting_in_reports_progress_to_the_end() -> None:
    region = HostRegion.create([64], [4096])
    told: list[tuple[int, int, float]] = []
    region.fault_in(lambda done, total, rate: told.append((done, total, rate)))
    assert told[-1][:2] == (region.nbytes, region.nbytes)
    assert all(rate > 0 for _, _, rate in told)
    region.close()


def test_huge_pages_are_used_where_the_kernel_gives_them() -> None:
    region = HostRegion.create([9], [2**20 + 4096])
    assert region.pages(0).ctypes.data % 2**21 == STATUS_BYTES
    region.fault_in()
    mapped = sum(int(n) for n in re.findall(r"ShmemPmdMapped:\s+(\d+) kB", Path("/proc/self/smaps").read_text()))
    assert (region.pages(0) == 0).all()
    region.pages(0)[8, -1] = 5
    twin = HostRegion.attach(region.path, [9], [2**20 + 4096])
    assert twin.pages(0)[8, -1] == 5
    with pytest.raises(ValueError, match="smaller"):
        HostRegion.attach(region.path, [99], [2**20])
    twin.close()
    region.close()
    if not mapped:
        pytest.skip("this kernel gives shared memory no huge pages")
    assert mapped >= 4 * 2048


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_region_that_cannot_be_mapped_leaves_no_descriptor_behind() -> None:
    region = HostRegion.create([4], [100])
    before = open_descriptors()
    with pytest.raises(ValueError, match="smaller"):
        HostRegion.attach(region.path, [99], [2**20])
    with pytest.raises(RefusedError, match="cannot map"):
        HostRegion.create([2**40], [2**22])
    assert open_descriptors() == before
    twin = HostRegion.attach(region.path, [4], [100])
    twin.close()
    assert open_descriptors() == before
    region.close()
    assert len(open_descriptors()) == len(before) - 1


def test_a_memory_file_system_that_is_filled_between_check_and_first_touch_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    """In a process of its own, because a memory access without a page behind it is a SIGBUS."""
    script = """
        import sys
        from forebay.engine.cache.host.region import HostRegion
        from forebay.errors import RefusedError
        region = HostRegion.create([48 * 256 - 1], [4096], folder=sys.argv[1])
        print("created", flush=True)
        sys.stdin.readline()
        try:
            region.fault_in()
        except RefusedError as error:
            print(error.code, "|", error.message, "|", error.fix)
    """
    with small_tmpfs(tmp_path / "shm", 64 * 2**20) as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "created\n"
        filler = Filler(folder)
        filler.fill()
        said, _ = process.communicate("now\n", timeout=60)
        filler.empty()
        filler.close()
    assert process.returncode == 0, f"ended by signal {-process.returncode}"
    code, message, fix = said.strip().split(" | ")
    assert code == Cause.SHM_TOO_SMALL
    assert "50.33 MB" in message
    assert "No space left" in message
    assert fix == "leave out --host-cache, or free memory in /dev/shm"


def test_another_process_sees_the_same_pages() -> None:
    region = HostRegion.create([4], [100])
    region.pages(0)[2] = 7
    script = f"""
        from forebay.engine.cache.host.region import HostRegion
        other = HostRegion.attach({region.path!r}, [4], [100])
        assert (other.pages(0)[2] == 7).all()
        other.pages(0)[3] = 9
        other.read_status[5] = 11
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    assert (region.pages(0)[3] == 9).all()
    assert region.read_status[5] == 11
    region.close()


def test_nothing_is_left_when_a_server_is_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    script = """
        import os, signal
        from forebay.engine.cache.host.region import HostRegion
        region = HostRegion.create([1000], [4096])
        region.fault_in()
        print(sorted(os.listdir("/dev/shm")), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    assert done.stdout, "the region was never made"
    mine = {name for name in set(os.listdir("/dev/shm")) - before if "forebay" in name or name.startswith("#")}
    assert not mine


def test_the_page_belongs_to_its_group_only() -> None:
    region = HostRegion.create([3, 2], [10, 20])
    for group, count in enumerate((3, 2)):
        for page in range(count):
            region.page(group, page)[:] = bytes([16 * group + page]) * (10 * (group + 1))
    assert [bytes(p)[0] for p in region.pages(0)] == [0, 1, 2]
    assert [bytes(p)[0] for p in region.pages(1)] == [16, 17]
    assert Path(region.path).exists()
    region.close()
