"""What the three modules make of real recorded answers, and the commands they build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.errors import RefusedError, UsageError
from forebay.machine.interface import HttpFailureKind
from forebay.servers.argv_flags import flag_value, has_flag
from forebay.servers.base import Condition, ProcessView, Role, StartRequest
from forebay.servers.http_client import ServerAnswer, parse_address
from forebay.servers.install import Installation, find_installation
from forebay.servers.prometheus import parse_metrics
from forebay.servers.registry import SERVERS, server_named, server_of_command
from forebay.servers.vllm_server import connector_of

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
SGLANG, VLLM, EMBEDDED = SERVERS["sglang"], SERVERS["vllm"], SERVERS["embedded"]


def body_of(path: Path) -> bytes:
    return path.read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")[2]


def answer(status: int, body: bytes = b"", seconds: float = 0.01) -> ServerAnswer:
    return ServerAnswer(status, body, seconds)


def test_the_status_decides_and_the_empty_body_is_never_asked() -> None:
    for server in (SGLANG, VLLM):
        assert server.read_health(answer(200)).condition is Condition.UP
    assert SGLANG.read_health(answer(503)).condition is Condition.STARTING
    assert SGLANG.read_health(answer(503, seconds=20.0)).condition is Condition.UNHEALTHY
    assert VLLM.read_health(answer(503)).condition is Condition.UNHEALTHY, "vLLM has no 503 phase: its engine is dead"


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_refused_is_not_up_and_silence_is_not_refusal(server: object) -> None:
    refused = ServerAnswer(None, b"", 0.0, HttpFailureKind.REFUSED)
    silent = ServerAnswer(None, b"", 30.0, HttpFailureKind.TIMEOUT)
    assert server.read_health(refused).condition is Condition.REFUSED  # type: ignore[attr-defined]
    assert server.read_health(silent).condition is Condition.SILENT  # type: ignore[attr-defined]


def test_the_embedded_server_names_its_stage_in_a_503() -> None:
    body = json.dumps({"status": "starting", "stage": "loading", "percent": 42.0}).encode()
    reading = EMBEDDED.read_health(answer(503, body))
    assert (reading.condition, reading.stage, reading.percent) == (Condition.STARTING, "loading", 42.0)
    assert EMBEDDED.read_health(answer(503, b'{"status": "dead"}')).condition is Condition.UNHEALTHY


def test_a_token_of_sglang_and_its_tiers() -> None:
    reading = SGLANG.read_token(answer(200, body_of(CAPTURES / "sglang" / "ready_POST_generate.txt")))
    assert reading.ok
    assert reading.prompt_tokens == 5
    meta = {
        "completion_tokens": 1,
        "prompt_tokens": 900,
        "cached_tokens": 832,
        "cached_tokens_details": {"device": 0, "host": 832},
    }
    hit = SGLANG.read_token(answer(200, json.dumps({"text": "x", "meta_info": meta}).encode()))
    assert hit.cached == {"device": 0, "host": 832}
    assert not SGLANG.read_token(answer(503)).ok
    assert not SGLANG.read_token(answer(200, b"")).ok


def test_a_token_of_vllm_and_its_cached_tokens() -> None:
    first, second = json.loads((CAPTURES / "vllm" / "run_observe" / "requests.json").read_text())[:2]
    cold, warm = (VLLM.read_token(answer(200, json.dumps(item["body"]).encode())) for item in (first, second))
    assert cold.cached == {"any": 0}
    assert warm.cached == {"any": 512}
    assert warm.ok
    assert not VLLM.read_token(answer(500, b'{"error": {}}')).ok


def test_sglang_counters() -> None:
    on = SGLANG.counters((CAPTURES / "sglang" / "metrics_hicache_on.txt").read_text())
    assert on.hits == {"device": 2650.0, "host": 2648.0, "disk": 0.0}
    assert on.pools == {"device": 20000.0, "host": 488282.0}
    assert (on.backed_up, on.loaded_back, on.generated) == (32946.0, 2648.0, 77.0)
    assert not on.busy
    off = SGLANG.counters((CAPTURES / "sglang" / "metrics_hicache_off.txt").read_text())
    assert "host" not in off.pools
    assert off.hits["host"] == 0.0


def test_vllm_counters_match_whole_names() -> None:
    folder = CAPTURES / "vllm" / "run_observe_external_kv"
    before, after = (
        VLLM.counters((folder / f"metrics_{name}.txt").read_text()) for name in ("before", "after_external_hit")
    )
    assert before.hits["external"] == 0.0
    assert after.hits["external"] == 512.0
    assert after.hits["device"] == 512.0
    assert after.pools["device"] == 46592.0


def test_metrics_skip_what_is_no_sample() -> None:
    text = '# HELP a b\na{x="1",y="q\\"z"} 2\na{x="2"} 3\na_created{x="1"} 9\na_bucket{le="1"} 4\nb NaN\nhalf'
    read = parse_metrics(text)
    assert read.total("a") == 5.0
    assert read.total("a", x="2") == 3.0
    assert read.by("a", "x") == {"1": 2.0, "2": 3.0}
    assert read.total("b") is None
    assert read.total("a_created") is None


def test_a_pause_of_sglang_is_told_from_a_stuck_scheduler() -> None:
    assert SGLANG.read_pause({"/ready": answer(503), "/ping": answer(200)}) is not None
    assert SGLANG.read_pause({"/ready": answer(503), "/ping": answer(503)}) is None
    assert SGLANG.read_pause({"/ready": answer(200), "/ping": answer(200)}) is None


def test_roles_survive_titles_that_hide_the_command_line() -> None:
    spawned = "python -B -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=32)"
    views = [
        ProcessView(1, 0, "python", "python -m vllm.entrypoints.openai.api_server --model /m"),
        ProcessView(2, 1, "python", "python -B -c from multiprocessing.resource_tracker import main;main(31)"),
        ProcessView(3, 1, "VLLM::EngineCor", "VLLM::EngineCore            "),
        ProcessView(4, 3, "python", spawned),
        ProcessView(5, 3, "VLLM::Worker", "VLLM::Worker_TP0"),
        ProcessView(6, 1, "g++", "g++ -O3 x.cpp"),
    ]
    expected = [Role.API_SERVER, Role.TRACKER, Role.ENGINE, Role.WORKER, Role.WORKER, Role.HELPER]
    assert list(VLLM.roles(views, 1).values()) == expected


@pytest.fixture
def recipe(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "bin" / "python", "0.5.23", tmp_path / "cpu")


def test_sglang_on_a_cpu_gets_the_recipe_and_the_flags_that_evidence_needs(recipe: Installation) -> None:
    planned = (
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "/m",
        "--enable-hierarchical-cache",
        "--hicache-size",
        "2",
    )
    launch = SGLANG.finalize_command(planned, {}, recipe, gpus=0)
    assert launch.argv[:2] == (str(recipe.python), f"{recipe.recipe}/launch.py")
    assert launch.argv.count("--enable-metrics") == 1
    assert flag_value(launch.argv, "--hicache-io-backend") == "direct"
    assert launch.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert {added.text for added in launch.added} >= {"--enable-metrics", "--enable-cache-report"}
    again = SGLANG.finalize_command(launch.argv, {}, recipe, gpus=0)
    assert again.argv == launch.argv, "adopting twice adds nothing"
    on_gpu = SGLANG.finalize_command(planned, {}, recipe, gpus=8)
    assert on_gpu.argv[:3] == (str(recipe.python), "-m", "sglang.launch_server")
    assert not has_flag(on_gpu.argv, "--device")


def test_vllm_gets_the_flag_that_evidence_needs_once(recipe: Installation) -> None:
    launch = VLLM.finalize_command(
        ("vllm", "serve", "--model", "/m", "--enable-prompt-tokens-details"), {}, recipe, gpus=1
    )
    assert launch.argv[:3] == (str(recipe.python), "-m", "vllm.entrypoints.openai.api_server")
    assert launch.argv.count("--enable-prompt-tokens-details") == 1
    assert launch.added == ()


def test_the_users_own_flags_win() -> None:
    flags = VLLM.flags(StartRequest(port=8000, extra=("--port", "9000")))
    assert flag_value(flags, "--port") == "9000"
    assert flags.count("--port") == 1
    with pytest.raises(UsageError, match="in tokens, not in bytes"):
        SGLANG.flags(StartRequest(device_cache_bytes=1))


def test_lower_tiers_are_what_was_asked_for() -> None:
    assert SGLANG.offload_tiers(("--enable-hierarchical-cache", "--hicache-storage-backend", "file")) == (
        "host",
        "disk",
    )
    assert SGLANG.offload_tiers(()) == ()
    config = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
    assert connector_of(("--kv-transfer-config", config)) == "ExampleConnector"
    assert VLLM.offload_tiers(("--kv-offloading-size", "4")) == ("host", "disk", "external")
    assert EMBEDDED.offload_tiers(("--host-cache", "1GB")) == ("host",)


def test_a_rewritten_setting_is_seen_in_the_servers_own_report() -> None:
    info = json.loads((CAPTURES / "sglang" / "server_info_hicache_on.json").read_text())
    argv = ("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-mem-layout", "page_first")
    counters = SGLANG.counters((CAPTURES / "sglang" / "metrics_hicache_on.txt").read_text())
    rows = {row.name: row for row in SGLANG.settings(argv, info, counters)}
    assert (rows["memory layout"].asked, rows["memory layout"].effective) == ("page_first", "page_first_direct")
    assert rows["host pool tokens per rank"].effective == "488282"


def test_whose_command_line_it_is() -> None:
    assert server_of_command("python -m vllm.entrypoints.openai.api_server --model x") == "vllm"
    assert server_of_command("sglang::scheduler") == "sglang"
    assert server_of_command("/usr/bin/forebay serve smollm2") == "embedded"
    assert server_of_command("python -m http.server 8000") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("http://h:8000/", ("h", 8000)), (":8000", ("127.0.0.1", 8000)), ("h:1", ("h", 1)),
     ("https://h", ("h", 443)), ("http://[::1]:9", ("::1", 9))],
)  # fmt: skip
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    found = parse_address(text)
    assert (found.host, found.port) == expected


def test_a_server_that_is_nowhere_is_refused_with_the_way_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="not installed") as caught:
        find_installation("sglang", ("sglang",), str(tmp_path / "bin" / "python"))
    assert caught.value.code == "dependency_missing"
    assert "scripts/peers/install.py sglang" in str(caught.value.fix)


def test_an_unfinished_peer_environment_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "peers" / "sglang"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to("/bin/sh")
    (root / "lib" / "python3.11" / "site-packages" / "sglang-0.5.23.dist-info").mkdir(parents=True)
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RefusedError):
        find_installation("sglang", ("sglang",))
    (root / "recipe.json").write_text("{}")
    assert find_installation("sglang", ("sglang",)).version == "0.5.23"


def test_every_server_is_known_by_name_and_no_other() -> None:
    assert {server_named(name).name for name in SERVERS} == {"embedded", "sglang", "vllm"}
    with pytest.raises(UsageError):
        server_named("llama.cpp")


@pytest.mark.parametrize("text", ["h", "ftp://h:1", "http://h:port"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        parse_address(text)
