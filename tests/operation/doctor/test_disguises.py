"""The same log through Docker, Kubernetes, journald, srun, torchrun and terminals has the same cause."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.operation.doctor import diagnose, read_file, read_text

DATA = Path(__file__).parents[2] / "data"

with (DATA / "cases" / "INDEX.tsv").open() as index:
    CASES = list(csv.DictReader(index, delimiter="\t"))
FROM_CAPTURES = {
    "sglang/fail_port_used_by_another_sglang.log": "port_in_use",
    "sglang/fail_hicache_size_1000.log": "host_pool_too_big",
    "vllm/fail_kvc_nixl/server.log": "dependency_missing",
    "vllm/fail_worker_killed_loading/server.log": "worker_killed",
    "vllm/fail_bad_gmu_range/server.log": "bad_flag",
    "vllm/start_eager/server.log": "",
}


def _each(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: "\n".join(change(line) for line in text.split("\n") if not line.startswith("#"))


def _noise(text: str) -> str:
    dice = random.Random(7)
    extra = [
        "Triton is installed, but doesn't include CPU backend. Disabling Triton.",
        "/x/y.py:12: UserWarning: CUDA error: out of memory is handled",
        "",
    ]
    lines = []
    for line in text.split("\n"):
        lines.append(line)
        if dice.random() < 0.3 and len(text) > 2000:
            lines.append(dice.choice(extra))
    return "\n".join(lines)


def _wrapped(width: int) -> Callable[[str], str]:
    """Cut at a terminal's width, as a copy from one is."""
    return lambda text: "\n".join(
        line[at : at + width]
        for line in text.split("\n")
        if not line.startswith("#")
        for at in range(0, max(len(line), 1), width)
    )


def _part(first: float, last: float) -> Callable[[str], str]:
    """Some of the lines, as shares of all of them."""

    def cut(text: str) -> str:
        lines = [line for line in text.split("\n") if not line.startswith("#")]
        return "\n".join(lines[int(len(lines) * first) : int(len(lines) * last)])

    return cut


def _garbage(text: str) -> str:
    dice, lines = random.Random(3), []
    for line in text.split("\n"):
        lines.append(line)
        if dice.random() < 0.1:
            lines.append("".join(chr(dice.randrange(255)) for _ in range(200)))
    return "\n".join(lines)


STAMP = "2026-01-01T00:00:07.123456789Z "
DISGUISES: dict[str, Callable[[str], str]] = {
    "docker_json": _each(lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": STAMP.strip()})),
    "kubernetes": _each(lambda line: f"{STAMP}stderr F {line}"),
    "timestamps": _each(lambda line: STAMP + line),
    "compose": _each(lambda line: f"llm-server-1  | {line}"),
    "kubectl_prefix": _each(lambda line: f"[pod/llm-0/main] {line}"),
    "journald": _each(lambda line: f"Nov 30 21:39:17 node7 python3[1234]: {line}"),
    "srun": _each(lambda line: f"3: {line}"),
    "colours": _each(lambda line: f"\x1b[36m{line[:9]}\x1b[0;1m{line[9:]}\x1b[0m"),
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "lying_notes": lambda text: "# cause: bad_flag\n# torch.OutOfMemoryError: CUDA out of memory\n# OOMKilled\n" + text,
    "other_pids": lambda text: re.sub(r"pid=(\d+)", lambda m: f"pid={int(m[1]) + 70_001}", text),
    "other_year": lambda text: text.replace("[2026-", "[2031-"),
    "noise": _noise,
}


DAMAGE: dict[str, Callable[[str], str]] = {
    "wrapped_at_200": _wrapped(200),
    "wrapped_at_120": _wrapped(120),
    "wrapped_at_80": _wrapped(80),
    "no_times": lambda text: re.sub(
        r"\b(INFO|ERROR|WARNING) \d\d-\d\d [\d:]{8} ", r"\1 ", re.sub(r"\[\d{4}-\d\d-\d\d [\d:]{8}[^]]*\] ?", "", text)
    ),
    "no_levels": lambda text: re.sub(r"\b(INFO|ERROR|WARNING) (?=\d\d-\d\d )", "", text),
    "head_cut": _part(0.1, 1.0),
    "end_cut": _part(0.0, 0.8),
    "first_half": _part(0.0, 0.5),
    "last_fifth": _part(0.8, 1.0),
    "garbage": _garbage,
    "every_line_twice": _each(lambda line: f"{line}\n{line}"),
    "all_called_errors": _each(lambda line: f"ERROR {line}"),
    "quoted": _each(lambda line: f"> {line}"),
    "indented": _each(lambda line: f"    {line}"),
    "double_spaced": lambda text: text.replace("\n", "\n\n"),
}
"""What may take the decisive line away: then the answer may be unknown, or a class of failures, and never another cause."""

CLASSES = ("", "unknown", "assertion", "engine_bug")
SAME_MATTER = {("host_oom_killed", "host_pool_too_big")}
"""Without the line of the kill, what is left is that the pools were being allocated when the log ends."""
CUT_WHILE_ALLOCATING = {("first_half", "index_71562823791.log")}
"""Ends while four ranks allocate 615 GB of host memory: a start that was killed ends with the same words."""


def _logs() -> dict[str, str]:
    logs = {str(DATA / "cases" / f"{c['file']}.log"): "" if c["cause"] == "-" else c["cause"] for c in CASES}
    return logs | {str(DATA / "captures" / name): cause for name, cause in FROM_CAPTURES.items()}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_log_has_no_wrong_cause(damage: str) -> None:
    wrong, found_again = [], 0
    logs = _logs()
    for path, cause in logs.items():
        text = Path(path).read_bytes().decode("utf-8", "replace")
        found = diagnose([read_text(DAMAGE[damage](text))]).cause or ""
        found_again += found == cause
        if (damage, Path(path).name) in CUT_WHILE_ALLOCATING:
            assert found == "host_pool_too_big"
            continue
        if found != cause and (cause, found) not in SAME_MATTER and (found not in CLASSES or not cause):
            wrong.append((Path(path).name, cause, found))
    assert wrong == []
    assert found_again > len(logs) / 4


def test_a_huge_log_is_read_in_bounded_memory_and_its_end_decides() -> None:
    from forebay.operation.doctor.read_log import KEEP, TAIL

    start = "[2026-03-04 10:00:00] server_args={'model_path': '/m'}\n[2026-03-04 10:01:00] The server is fired up and ready to roll!\n"
    end = "[2026-03-04 14:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.\n[2026-03-04 14:00:02] Received sigquit from a child process. It usually means the child failed.\n"
    served = "".join(
        f'[2026-03-04 11:00:00] INFO:     10.0.0.1:{number % 60_000} - "POST /v1/completions HTTP/1.1" 200 OK\n'
        f"something odd {number * 7919 % 10**9:x} happened\n"
        for number in range(60_000)
    )
    log = read_text(start + served + end)
    assert len(log.kept) <= 2 * KEEP + TAIL
    answer = diagnose([log])
    assert (answer.cause, answer.came_up) == ("runtime_or_init_oom", True)


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_disguised_log_has_the_cause_of_the_plain_one(disguise: str) -> None:
    wrong = []
    for path, cause in _logs().items():
        text = Path(path).read_bytes().decode("utf-8", "replace")
        found = diagnose([read_text(DISGUISES[disguise](text))]).cause or ""
        if found != cause:
            wrong.append((Path(path).name, cause, found))
    assert wrong == []


def test_the_first_failing_rank_counts_and_not_the_last() -> None:
    def rank(number: int, clock: str, message: str) -> str:
        head = f"[2026-03-04 {clock} TP{number}] "
        return f"{head}Load weight begin. avail mem=77.10 GB\n{head}Scheduler hit an exception: Traceback (most recent call last):\n{message}\n"

    reset = rank(
        0,
        "10:20:40",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1",
    )
    missing = rank(
        3, "10:20:31", "FileNotFoundError: [Errno 2] No such file or directory: '/m/model-00002-of-00003.safetensors'"
    )
    late = rank(
        2, "10:20:39", "ValueError: Not enough host memory available. Requesting 8.00 GB but only have 1.00 GB free."
    )
    logs = [read_text(reset, "rank0.log"), read_text(late, "rank2.log"), read_text(missing, "rank3.log")]
    for order in (logs, logs[::-1]):
        answer = diagnose(order)
        assert answer.cause == "checkpoint_missing"
        assert (answer.evidence[0].source, answer.evidence[0].line) == ("rank3.log", 3)
        assert "host_pool_too_big" in answer.others
    interleaved = "\n".join(
        line for group in zip(*(text.split("\n") for text in (reset, missing, late))) for line in group
    )
    assert diagnose([read_text(interleaved)]).cause == "checkpoint_missing"


def test_of_several_starts_in_one_file_the_last_counts() -> None:
    failed = "[2026-03-04 10:00:00] server_args={'model_path': '/m'}\n[2026-03-04 10:00:09 TP0] Scheduler hit an exception: Traceback (most recent call last):\nRuntimeError: NCCL error: unhandled system error\n[2026-03-04 10:00:10] kill_process_tree called: parent_pid=1, include_parent=True, pid=1\n"
    good = "[2026-03-04 11:00:00] server_args={'model_path': '/m'}\n[2026-03-04 11:00:30 TP0] Load weight begin. avail mem=77.10 GB\n[2026-03-04 11:01:00] The server is fired up and ready to roll!\n"
    answer = diagnose([read_text(failed + good)])
    assert (answer.cause, answer.came_up) == (None, True)
    assert diagnose([read_text(good + failed.replace(" 10:", " 12:"))]).cause == "nccl_error"


def test_a_log_in_utf_16_reads_like_the_plain_one(tmp_path: Path) -> None:
    plain = DATA / "captures" / "sglang" / "fail_bad_flag.log"
    other = tmp_path / "redirected.log"
    other.write_bytes(plain.read_text().replace("\n", "\r\n").encode("utf-16"))
    ours, theirs = diagnose([read_file(other)]), diagnose([read_file(plain)])
    assert (
        (ours.cause, ours.evidence[0].line)
        == (theirs.cause, theirs.evidence[0].line)
        == ("bad_flag", ours.evidence[0].line)
    )


@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 400], ids=["empty", "binary"])
def test_what_is_no_log_is_not_called_fine(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "what.log"
    path.write_bytes(content)
    answer = diagnose([read_file(path)])
    assert answer.cause is None
    assert answer.came_up is None
    assert "no line of text to read in" in answer.meaning
    assert "what.log" in answer.meaning
