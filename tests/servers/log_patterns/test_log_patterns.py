"""Stages, error marks and settings on real logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.servers.log_patterns import Stage, StageTracker, detect_server, effective_settings, grammar_for, parse_line

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
SGLANG_GOOD = sorted(path.name for path in (CAPTURES / "sglang").glob("*.log") if not path.name.startswith("fail"))
VLLM_GOOD = [
    "start_eager",
    "start_compile",
    "tp2_dummy_bind",
    "tp3_bind",
    "tp3_nobind",
    "kvc_example_connector",
    "double_start_a",
]


def follow(server: str, path: Path) -> tuple[StageTracker, list[Stage]]:
    tracker = StageTracker(server)
    entered = [tracker.stage]
    for line in path.read_bytes().decode("utf-8", "replace").split("\n"):
        event = tracker.feed(line)
        if event is not None and event.entered:
            entered.append(event.stage)
    return tracker, entered


@pytest.mark.parametrize("name", SGLANG_GOOD)
def test_a_good_sglang_start_goes_through_the_stages_in_order(name: str) -> None:
    tracker, entered = follow("sglang", CAPTURES / "sglang" / name)
    expected = [
        Stage.PREFLIGHT,
        Stage.LAUNCHED,
        Stage.LOADING,
        Stage.DEVICE_POOL,
        Stage.HOST_POOL,
        Stage.WARMING_UP,
        Stage.SERVING,
    ]
    tier = any(word in name for word in ("hicache", "l3", "write_back"))
    assert entered == [stage for stage in expected if tier or stage is not Stage.HOST_POOL]
    assert tracker.error is None


@pytest.mark.parametrize("name", VLLM_GOOD)
def test_a_good_vllm_start_goes_through_the_stages_in_order(name: str) -> None:
    tracker, entered = follow("vllm", CAPTURES / "vllm" / name / "server.log")
    assert entered == [
        Stage.PREFLIGHT,
        Stage.LAUNCHED,
        Stage.LOADING,
        Stage.DEVICE_POOL,
        Stage.WARMING_UP,
        Stage.SERVING,
    ]
    assert tracker.error is None


def test_the_ready_line_of_a_server_without_a_port_is_not_believed() -> None:
    tracker, entered = follow("sglang", CAPTURES / "sglang" / "fail_port_used_by_another_sglang.log")
    assert Stage.SERVING not in entered
    assert tracker.port_lost
    assert tracker.error is not None
    assert tracker.error.line == 60


@pytest.mark.parametrize(
    ("server", "line", "stage", "percent"),
    [
        (
            "vllm",
            "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:10<00:30, 10.12s/it]",
            Stage.LOADING,
            25,
        ),
        (
            "sglang",
            "[2026-01-01 00:31:58 TP0] Loading safetensors checkpoint shards:  98% Completed | 160/163 [31:58<00:30, "
            "10.12s/it]",
            Stage.LOADING,
            98.2,
        ),
        (
            "sglang",
            "\rMulti-thread loading shards:   0% Completed | 0/8 [00:00<?, ?it/s]\rMulti-thread loading shards:  50% "
            "Completed | 4/8 [00:02<00:02, 2it/s]",
            Stage.LOADING,
            50,
        ),
        (
            "sglang",
            "[2026-01-01 00:00:22] Capturing batches (bs=496 avail_mem=20.14 GB):   2%|#  | 1/52 [00:01<00:50, "
            "1.0it/s]",
            Stage.CAPTURING,
            1.9,
        ),
        (
            "vllm",
            "(Worker_TP0 pid=1) Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  37%|###7 | 19/51 "
            "[00:03<00:05,  6.10it/s]",
            Stage.CAPTURING,
            37.3,
        ),
        (
            "vllm",
            "(EngineCore pid=1) INFO 01-01 00:00:34 [gpu_model_runner.py:3480] Graph capturing finished in 18 secs, "
            "took -0.03 GiB",
            Stage.CAPTURING,
            100,
        ),
        (
            "embedded",
            '2026-11-30T23:50:01.123Z INFO stage rank=0 name="device pool" progress=0.5',
            Stage.DEVICE_POOL,
            50,
        ),
        ("embedded", "2026-11-30T23:50:01.123Z INFO stage name=serving", Stage.SERVING, None),
    ],
)
def test_progress_is_read_from_bars_and_events(server: str, line: str, stage: Stage, percent: float | None) -> None:
    event = StageTracker(server).feed(line)
    assert event is not None
    assert (event.stage, event.percent) == (stage, percent)


def test_settings_in_effect_carry_their_lines() -> None:
    path = CAPTURES / "sglang" / "good_start_tp2_hicache_page64.log"
    found = effective_settings(path.read_text(errors="replace").split("\n"), "sglang")
    assert found["device_pool_tokens"].value == 19_968
    assert (found["host_pool_tokens"].value, found["host_pool_bytes"].value) == (976_576, 1_000_000_000)
    assert (found["host_pool_bytes"].per_rank, found["host_pool_bytes"].ranks) == (True, 2)
    assert "Page first layout is not supported" in found["layout_rewritten"].text
    vllm = effective_settings((CAPTURES / "vllm/start_eager/server.log").read_text(errors="replace").split("\n"))
    assert (vllm["device_pool_tokens"].value, vllm["context_tokens"].value) == (46_592, 4_096)
    assert vllm["address"].value == "http://127.0.0.1:8101"


@pytest.mark.parametrize(
    ("raw", "process", "rank", "level", "text"),
    [
        (
            "(Worker_TP3_EP3 pid=103) INFO 01-01 00:00:01 [gpu_worker.py:760] Available KV",
            "worker",
            3,
            "INFO",
            "Available KV",
        ),
        ("(EngineCore_DP0 pid=7) ERROR 01-01 00:00:01 [core.py:843] boom", "engine", None, "ERROR", "boom"),
        (
            "(Worker pid=2) [Stage-0] ERROR 03-12 08:22:28 [multiproc_executor.py:800] boom",
            "worker",
            None,
            "ERROR",
            "boom",
        ),
        ("INFO 01-01 00:00:01 worker.py:267] old", "", None, "INFO", "old"),
        ("[2026-01-01 00:00:01 DP2 TP5] hello", "worker", 5, "", "hello"),
        ("[2026-01-01 00:00:01] ERROR:    [Errno 98] taken", "", None, "ERROR", "[Errno 98] taken"),
        ("E0101 00:00:02.000000 100 transfer_task.cpp:572] Failed", "", None, "ERROR", "Failed"),
        ("2026-01-01T00:00:00.5Z stderr F [2026-01-01 00:00:01 TP1] hello", "worker", 1, "", "hello"),
        ('{"log":"[2026-01-01 00:00:01 TP1] hello\\n","stream":"stderr","time":"x"}', "worker", 1, "", "hello"),
        ("[rank2]: RuntimeError: boom", "", 2, "", "RuntimeError: boom"),
        ("\x1b[36m(APIServer pid=9)\x1b[0;0m INFO 01-01 00:00:01 [x.py:1] hi", "front", None, "INFO", "hi"),
        (
            "2026-11-30T23:50:01.123Z ERROR died rank=1 code=worker_killed",
            "worker",
            1,
            "ERROR",
            "died rank=1 code=worker_killed",
        ),
    ],
)
def test_a_line_is_taken_apart(raw: str, process: str, rank: int | None, level: str, text: str) -> None:
    line = parse_line(1, raw)
    assert (line.process, line.rank, line.level, line.text) == (process, rank, level, text)


def test_the_server_is_told_from_its_marks() -> None:
    assert detect_server([parse_line(1, "[2026-01-01 00:00:01 TP0] Load weight begin.")]) == "sglang"
    assert detect_server([parse_line(1, "(EngineCore pid=1) INFO 01-01 00:00:01 [core.py:1] x")]) == "vllm"
    assert detect_server([parse_line(1, "LMCache INFO: Creating LMCacheEngine instance x (a.py:1:b)")]) == "vllm"
    assert detect_server([parse_line(1, "2026-11-30T23:50:01.123Z INFO listening host=::1")]) == "embedded"
    assert detect_server([parse_line(1, "RuntimeError: boom")]) == "unknown"


@pytest.mark.parametrize("server", ["embedded", "sglang", "vllm"])
def test_every_stage_of_a_grammar_has_its_place_in_the_order(server: str) -> None:
    grammar = grammar_for(server)
    assert {pattern.stage for pattern in grammar.stages} <= set(grammar.order)
