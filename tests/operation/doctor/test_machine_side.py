"""What the machine's own records add, and what they deny."""

from __future__ import annotations

from forebay.operation.doctor import Observations, diagnose, read_text

LOADING = "[2026-03-04 10:20:30 TP0] Load weight begin. avail mem=77.10 GB\n"
DIED = (
    LOADING
    + "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.\n"
)
KILL = "Out of memory: Killed process 4242 (sglang::schedul) total-vm:9kB, anon-rss:52428800kB, file-rss:0kB"


def test_a_kernel_record_of_our_process_is_out_of_memory() -> None:
    answer = diagnose([read_text(LOADING)], Observations(exit_code=-9, kernel_lines=(KILL,), pids=(1, 4242)))
    assert answer.cause == "host_oom_killed"
    assert "50.0 GiB" in answer.meaning
    assert [item.source for item in answer.evidence][:1] == ["kernel log"]


def test_a_kernel_record_of_somebody_else_is_not() -> None:
    answer = diagnose([read_text(LOADING)], Observations(exit_code=-9, kernel_lines=(KILL,), pids=(1, 77)))
    assert answer.cause == "front_killed"


def test_a_counted_kill_in_the_cgroup_is_out_of_memory() -> None:
    assert diagnose([read_text(LOADING)], Observations(exit_code=137, oom_kills=1)).cause == "host_oom_killed"


def test_a_childs_minus_nine_is_out_of_memory_unless_the_records_deny_it() -> None:
    assert diagnose([read_text(DIED)]).cause == "host_oom_killed"
    assert diagnose([read_text(DIED)], Observations(oom_kills=0)).cause == "worker_killed"
    assert diagnose([read_text(DIED)], Observations(kernel_readable=True)).cause == "worker_killed"


def test_exit_137_of_sglang_is_not_out_of_memory() -> None:
    log = (
        LOADING
        + "[2026-03-04 10:20:31 TP0] Scheduler hit an exception: Traceback (most recent call last):\nValueError: Not enough host memory available. Requesting 8.00 GB but only have 1.50 GB free.\n"
    )
    answer = diagnose([read_text(log)], Observations(exit_code=137))
    assert answer.cause == "host_pool_too_big"
    assert "host_oom_killed" in [item.cause for item in answer.ruled_out]


def test_a_stopped_process_is_hung_and_named() -> None:
    answer = diagnose([read_text(LOADING)], Observations(states={9: "S", 12: "T"}, names={12: "engine"}))
    assert answer.cause == "engine_hung"
    assert "engine (pid 12)" in answer.meaning
    assert "kill -CONT 12" in (answer.fix or "")


def test_a_signal_that_asked_it_to_stop_is_no_failure_once_it_served() -> None:
    up = LOADING + "[2026-03-04 10:21:00] The server is fired up and ready to roll!\n"
    assert diagnose([read_text(up)], Observations(exit_code=-15)).cause is None
    assert diagnose([read_text(LOADING)], Observations(exit_code=-15)).cause == "stopped_on_request"


def test_without_records_nothing_is_concluded_from_an_exit_code_of_one() -> None:
    assert diagnose([read_text(LOADING)], Observations(exit_code=1)).cause in (None, "unknown")
