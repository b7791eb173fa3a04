"""vLLM's rules: GiB in total, one budget a GPU, one request that must fit, and groups of layers."""

from __future__ import annotations

import math

import pytest
from plan_helpers import GB, GIB, codes, plan, warned

from forebay.model.catalogue import find
from forebay.model.families import read_geometry
from forebay.model.geometry import ModelGeometry
from forebay.planning.vllm.device_memory import groups, largest_length, pool


def geometry(name: str) -> ModelGeometry:
    entry = find(name)
    assert entry is not None
    return read_geometry(entry.config)


def test_offloading_size_is_gib_in_total_over_the_ranks() -> None:
    made = plan("qwen3-32b", "vllm", "--kv-offloading-size 100", tp=4, gpus="4x80GB")
    assert made.host.total_bytes == 100 * GIB
    assert made.host.per_rank_bytes == 25 * GIB
    assert made.host.distinct_tokens == pytest.approx(100 * GIB / (64 * 2 * 8 * 128 * 2), rel=0.001)


def test_latent_kv_is_offloaded_once_by_this_version_and_by_every_rank_before() -> None:
    flags = "--kv-offloading-size 100"
    now = plan("deepseek-v3", "vllm", flags, tp=8, gpus="8x141GB")
    before = plan("deepseek-v3", "vllm", flags, tp=8, gpus="8x141GB", version="0.20.0")
    assert now.host.distinct_tokens == pytest.approx(100 * GIB / 70_272, rel=0.005)
    assert now.host.distinct_tokens == pytest.approx(8 * before.host.distinct_tokens, rel=0.005)
    assert "offload_overallocates" in warned(before)


def test_the_lmcache_back_end_ignores_the_size() -> None:
    made = plan("qwen3-32b", "vllm", "--kv-offloading-size 1000 --kv-offloading-backend lmcache", tp=2, gpus="2x80GB")
    assert made.fits
    assert made.host.total_bytes == 0
    assert any("is ignored with the lmcache back end" in item.message for item in made.warnings)


def test_lmcache_in_the_process_is_per_rank() -> None:
    flags = """--kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'"""
    env = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "100"}
    made = plan("qwen2.5-72b", "vllm", flags, tp=4, gpus="4x80GB", env=env, host_memory_bytes=300 * GB)
    assert codes(made) == ["host_pool_too_big"]
    assert "4 × 100 GiB" in made.problems[0].message
    default = plan("qwen2.5-72b", "vllm", flags, tp=4, gpus="4x80GB", host_memory_bytes=300 * GB)
    assert default.host.total_bytes == 4 * 5 * GIB


def test_a_tier_larger_than_dev_shm_is_refused_though_the_memory_is_there(tmp_path: object) -> None:
    from forebay.machine.facts import MachineFacts
    from forebay.machine.memory import HostMemory, ShmSpace
    from forebay.planning import make_plan as build

    memory = HostMemory(900 * GB, 800 * GB, 0, 0, None, ShmSpace(64 * 2**20, 64 * 2**20), None, ())
    facts = MachineFacts(1, "box", 0.0, 8, memory, ())
    options = build.PlanOptions("qwen3-32b", "vllm", tp=2, gpus="2x80GB", server_flags=("--kv-offloading-size", "100"))
    room = build._room(options, facts)
    request = build.PlanRequest(
        build.resolve("qwen3-32b"), "vllm", "0.32.0", room, tp=2, flags={"kv_offloading_size": 100.0}
    )
    made = build._planner("vllm")(request)
    assert codes(made) == ["shm_too_small"]
    assert "--shm-size" in made.problems[0].fix


def test_the_budget_is_a_fraction_of_the_whole_gpu() -> None:
    made = plan("qwen3-32b", "vllm", tp=2, gpus="2x80GB")
    assert made.device.static_bytes == math.ceil(80 * GB * 0.92)
    assert plan("qwen3-32b", "vllm", tp=2, gpus="2x80GB", version="0.15").device.static_fraction == 0.9


def test_graphs_count_inside_the_budget_since_0_21() -> None:
    inside, outside = (
        plan("qwen3-32b", "vllm", "--gpu-memory-utilization 0.9", tp=2, gpus="2x80GB", version=version)
        for version in ("0.21.0", "0.20.2")
    )
    assert outside.device.kv_bytes - inside.device.kv_bytes == GIB
    eager = plan("qwen3-32b", "vllm", "--gpu-memory-utilization 0.9 --enforce-eager", tp=2, gpus="2x80GB")
    assert eager.device.kv_bytes == outside.device.kv_bytes


def test_explicit_kv_bytes_replace_the_profile() -> None:
    made = plan("smollm2", "vllm", "--kv-cache-memory-bytes 20M", gpus="24GB")
    assert made.device.kv_bytes == 20 * 2**20


def test_the_cpu_cache_of_the_captures() -> None:
    """VLLM_CPU_KVCACHE_SPACE=1: 46,592 tokens of SmolLM2 at TP 1 and 139,776 at TP 3, in blocks of 128."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    for tp, tokens in ((1, 46_592), (3, 139_776)):
        assert plan("smollm2", "vllm", tp=tp, env=env, context=4096).device.kv_tokens == tokens


def test_one_request_must_fit_or_vllm_ends() -> None:
    made = plan("llama-3.1-8b", "vllm", "--gpu-memory-utilization 0.9", gpus="24GB")
    assert codes(made) == ["ctx_too_long_for_kv"]
    length = int(made.problems[0].fix.split()[-1])
    again = "--gpu-memory-utilization 0.9"
    assert plan("llama-3.1-8b", "vllm", again, gpus="24GB", context=length).fits
    assert not plan("llama-3.1-8b", "vllm", again, gpus="24GB", context=length + 16).fits


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-120b", "qwen3-next-80b-a3b", "qwen3-32b"])
def test_the_longest_length_is_the_longest(name: str) -> None:
    found, budget = groups(geometry(name), 4, None), 3 * GIB
    longest = largest_length(found, budget, 16, 10**6, 8192)
    assert pool(found, budget, 16, longest, 8192).concurrency >= 1
    assert longest == 10**6 or pool(found, budget, 16, longest + 16, 8192).concurrency < 1


def test_window_layers_make_hybrid_pools_hold_more_than_their_bytes_a_token_say() -> None:
    found = groups(geometry("gemma-3-27b"), 1, None)
    every_token = sum(group.layers * group.token_bytes for group in found)
    made = pool(found, 20 * GIB, 16, 131072, 8192)
    assert made.tokens > 2 * (20 * GIB // every_token)


def test_weights_over_the_budget_name_the_utilization_or_the_ranks() -> None:
    assert codes(plan("qwen3-32b", "vllm", "--gpu-memory-utilization 0.5", gpus="80GB")) == ["weights_exceed_static"]
    made = plan("kimi-k2.5", "vllm", tp=8, gpus="8x80GB")
    assert codes(made) == ["no_window"]
    assert "--tp 16" in made.problems[0].fix


def test_quantized_kv_keeps_its_scales() -> None:
    assert plan("qwen3-32b", "vllm", kv_dtype="fp8").kv_bytes_per_token == 64 * 2 * 8 * 128
    assert plan("qwen3-32b", "vllm", kv_dtype="nvfp4").kv_bytes_per_token == 64 * 2 * 8 * 128 * 9 // 16
    assert plan("deepseek-v3.2", "vllm").kv_bytes_per_token == 61 * (656 + 132)


def test_the_command_speaks_vllms_units() -> None:
    command = list(plan("qwen3-32b", "vllm", tp=2, gpus="2x80GB", host_cache_bytes=64 * GIB, context=8192).command)
    assert command[command.index("--kv-offloading-size") + 1] == "64.0"
    assert command[command.index("--max-model-len") + 1] == "8192"
