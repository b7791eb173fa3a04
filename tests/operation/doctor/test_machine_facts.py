"""What the machine has, given beside the log: asked x ranks against what is there, and the value that fits this launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from forebay.operation.doctor import diagnose, read_file, read_text
from forebay.operation.doctor.facts import HostFacts
from forebay.sizes import GB

ASKED = (
    "[2026-03-04 10:00:00] server_args={'model_path': 'meta-llama/Llama-3.1-70B-Instruct', 'tp_size': 4, 'hicache_size': 300, "
    "'enable_hierarchical_cache': True}\n[2026-03-04 10:00:40 TP0] Load weight begin. avail mem=77.10 GB\n"
)
ALLOCATING = "".join(
    f"[2026-03-04 10:01:00 TP{rank}] Allocating {{size}}.00 GB host memory for hierarchical KV cache.\n"
    for rank in range(4)
)


def silent_end(size: int) -> str:
    """Four ranks allocate, and the log ends."""
    return ASKED + ALLOCATING.format(size=size)


def test_without_facts_a_silent_end_names_the_sum_and_the_smallest_machine_as_likely() -> None:
    answer = diagnose([read_text(silent_end(300))])
    assert (answer.cause, answer.confidence) == ("host_pool_too_big", "likely")
    assert "300 GB in each of 4 ranks, 1.2 TB together" in answer.meaning
    assert "at least 1.211 TB of free host memory would hold it" in answer.meaning


def test_with_facts_the_fix_has_the_size_that_this_machine_holds() -> None:
    answer = diagnose([read_text(silent_end(300))], machine=HostFacts(host_memory_bytes=449 * GB))
    assert answer.cause == "host_pool_too_big"
    assert "the machine has 449 GB" in answer.meaning
    assert "--hicache-size 104 or less" in (answer.fix or "")


def test_on_a_machine_that_holds_the_pools_a_silent_end_is_not_their_size() -> None:
    assert diagnose([read_text(silent_end(40))], machine=HostFacts(host_memory_bytes=449 * GB)).cause is None


def doctor(tmp_path: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    env = {"FOREBAY_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "forebay.cli", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, input=given, timeout=120, env=env, check=False)


def test_the_planner_names_the_flag_for_this_launch_on_this_machine(tmp_path: Path) -> None:
    done = doctor(tmp_path, "-", "--host-memory", "449GB", "--gpus", "4x80GB", given=silent_end(300))
    assert "cause: host_pool_too_big (likely)" in done.stdout
    assert "for this launch on this machine: host pools: 4 × 300 GB" in done.stdout
    assert "--hicache-size 107" in done.stdout


@pytest.mark.parametrize("option", ["--host-memory", "--gpus", "--shm"])
def test_a_size_that_cannot_be_read_is_one_line(tmp_path: Path, option: str) -> None:
    done = doctor(tmp_path, "-", option, "many", given=silent_end(300))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr
    assert "Traceback" not in done.stderr


def test_a_log_packed_with_zstd_reads_like_the_plain_one(tmp_path: Path) -> None:
    packed = tmp_path / "server.log.zst"
    packed.write_bytes(zstandard.compress(silent_end(300).encode()))
    answer = diagnose([read_file(packed)])
    assert (answer.cause, answer.evidence[0].line) == ("host_pool_too_big", 3)
