"""The doctor on recorded logs: labelled cases from the field, and every capture of the two real servers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from forebay.operation.doctor import Observations, diagnose, read_file

DATA = Path(__file__).parents[2] / "data"
CAPTURES = DATA / "captures"

with (DATA / "cases" / "INDEX.tsv").open() as index:
    CASES = list(csv.DictReader(index, delimiter="\t"))

SGLANG = {
    "fail_bad_choice": "bad_flag",
    "fail_bad_flag": "bad_flag",
    "fail_hicache_io_kernel": "hicache_kernel_unsupported",
    "fail_hicache_size_1000": "host_pool_too_big",
    "fail_hicache_unpatched_cuda_host_register": "pin_failed",
    "fail_mem_fraction_0_0001": "weights_exceed_static",
    "fail_mem_fraction_1_5": "host_oom_killed",
    "fail_model_missing": "checkpoint_missing",
    "fail_no_cpu_engine_env": "dependency_missing",
    "fail_no_sgl_kernel_stub": "dependency_missing",
    "fail_port_in_use": "port_in_use",
    "fail_port_used_by_another_sglang": "port_in_use",
    "fail_tp2_no_omp_bind": "numa_binding",
}
VLLM = {
    "fail_bad_choice": "bad_flag",
    "fail_bad_flag": "bad_flag",
    "fail_bad_gmu_range": "bad_flag",
    "fail_bad_value": "bad_flag",
    "fail_bind_address_not_local": "bind_failed",
    "fail_console_script": "dependency_missing",
    "fail_engine_killed_loading": "worker_killed",
    "fail_kv_too_small_bytes": "ctx_too_long_for_kv",
    "fail_kv_too_small_len": "ctx_too_long_for_kv",
    "fail_kvc_badjson": "bad_flag",
    "fail_kvc_badrole": "bad_flag",
    "fail_kvc_lmcache": "dependency_missing",
    "fail_kvc_nixl": "dependency_missing",
    "fail_kvc_norole": "bad_flag",
    "fail_kvc_unknown": "connector_unsupported",
    "fail_kvc_unknown_key": "bad_flag",
    "fail_kvspace_float": "bad_flag",
    "fail_kvspace_over_ram": "host_pool_too_big",
    "fail_len_over_model": "ctx_too_long_for_model",
    "fail_model_hub_offline": "checkpoint_missing",
    "fail_model_missing": "checkpoint_missing",
    "fail_no_config": "checkpoint_missing",
    "fail_no_tokenizer": "tokenizer_missing",
    "fail_port_in_use_http": "port_in_use",
    "fail_port_in_use_http_anyhost": "port_in_use",
    "fail_port_in_use_vllm": "port_in_use",
    "fail_truncated_weights": "checkpoint_corrupt",
    "fail_worker_killed_loading": "worker_killed",
    "kv_offloading_size_1": "connector_unsupported",
    "kvc_offloading_connector": "connector_unsupported",
    "kvc_simple_cpu_offload": "connector_unsupported",
    "tp2_auto": "tp_not_divisible",
    "tp2_dummy_auto": "numa_binding",
    "tp3_auto": "numa_binding",
    "stop_loading_sigint": "stopped_on_request",
    "stop_loading_sigterm_group": "stopped_on_request",
    "stop_loading_sigterm_x3": "stopped_on_request",
    "stop_sigterm_early": "stopped_on_request",
}
DIED_SERVING = {
    "fault_sigkill_engine": "worker_killed",
    "fault_sigkill_engine_keepalive": "worker_killed",
    "fault_sigkill_worker": "worker_killed",
    "fault_sigstop_worker_timeout": "engine_hung",
}
UNDECIDABLE = {"double_start_b", "port_thief_during_load"}
"""Announced and never answered: the same words as a start that nobody used."""


def _capture(server: str, name: str) -> Path:
    return CAPTURES / server / f"{name}.log" if server == "sglang" else CAPTURES / server / name / "server.log"


def _healthy() -> list[tuple[str, str]]:
    sglang = [path.stem for path in (CAPTURES / "sglang").glob("*.log")]
    vllm = [path.parent.name for path in (CAPTURES / "vllm").glob("*/server.log")]
    named = [("sglang", name) for name in sglang if name not in SGLANG]
    return named + [("vllm", name) for name in vllm if name not in VLLM and name not in DIED_SERVING]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["file"]))
def test_a_labelled_case_gets_its_label_and_an_ok_log_none(case: dict[str, str]) -> None:
    answer = diagnose([read_file(DATA / "cases" / f"{case['file']}.log")])
    assert answer.cause == (None if case["cause"] == "-" else case["cause"]), answer
    assert answer.server in (case["engine"].split("+")[0], "unknown")
    assert answer.came_up is (False if case["outcome"] == "fail" else answer.came_up or None)
    if answer.cause:
        assert answer.fix
        assert all(not item.text.startswith("#") for item in answer.evidence)


def test_the_server_is_recognised_in_nearly_all_cases() -> None:
    unknown = [
        c["file"] for c in CASES if diagnose([read_file(DATA / "cases" / f"{c['file']}.log")]).server == "unknown"
    ]
    assert len(unknown) <= 2, unknown


@pytest.mark.parametrize(("server", "name"), [*(("sglang", n) for n in SGLANG), *(("vllm", n) for n in VLLM)])
def test_a_failed_start_of_a_real_server_has_its_cause(server: str, name: str) -> None:
    answer = diagnose([read_file(_capture(server, name))])
    assert answer.cause == (SGLANG if server == "sglang" else VLLM)[name], answer
    assert (answer.server, answer.came_up) == (server, False)


@pytest.mark.parametrize("name", DIED_SERVING)
def test_a_death_while_serving_came_up_first(name: str) -> None:
    answer = diagnose([read_file(_capture("vllm", name))])
    assert (answer.cause, answer.came_up) == (DIED_SERVING[name], True), answer


@pytest.mark.parametrize(("server", "name"), _healthy())
def test_a_good_start_or_clean_stop_has_no_cause(server: str, name: str) -> None:
    answer = diagnose([read_file(_capture(server, name))])
    assert answer.cause is None, answer
    assert answer.came_up is (None if name in UNDECIDABLE else True)
    assert answer.others == ()


def test_a_killed_front_is_only_known_from_its_exit_code() -> None:
    log = read_file(_capture("vllm", "fault_sigkill_api"))
    assert diagnose([log]).cause is None
    assert diagnose([log], Observations(exit_code=-9)).cause == "front_killed"


def test_the_fixes_carry_the_numbers() -> None:
    def fix(server: str, name: str) -> str:
        return diagnose([read_file(_capture(server, name))]).fix or ""

    assert "--hicache-size 10 " in fix("sglang", "fail_hicache_size_1000")  # 90 % of the 11.84 GB that were free
    assert "write --hicache-size instead of --hicache-sise" in fix("sglang", "fail_bad_flag")
    assert "write --max-model-len instead of --max-modellen" in fix("vllm", "fail_bad_flag")
    assert "--port 31011" in fix("sglang", "fail_port_in_use")
    assert "VLLM_CPU_KVCACHE_SPACE=19" in fix("vllm", "fail_kvspace_over_ram")
    assert "--max-model-len 46464" in fix("vllm", "fail_kv_too_small_len")  # the log's 46,478, rounded to a block
    assert "9 heads divide by 1, 3, 9" in fix("vllm", "tp2_auto")
