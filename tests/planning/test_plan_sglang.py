"""SGLang's rules: units, sizing, refusals, and what it rewrites without asking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import GB, GIB, codes, plan, warned

from forebay.errors import UsageError
from forebay.machine.recorded import RecordedMachine
from forebay.model.catalogue import names
from forebay.planning.make_plan import PlanOptions, make_plan
from forebay.planning.plan import from_json
from forebay.planning.sglang.device_memory import KVBytesPerToken, WeightLoad, default_static_fraction, device_pool


def test_a_host_pool_has_one_page_more_than_its_size_holds() -> None:
    """As in the captures: 2 GB of SmolLM2 in pages of 64 are 86,848 tokens,
    1 GB at 2,048 B and pages of 1 are 488,282.
    """
    made = plan("smollm2", "sglang", "--hicache-size 2 --page-size 64 --max-total-tokens 8192")
    assert made.host.per_rank_tokens == 86_848
    assert made.device.kv_tokens == 8192


def test_a_pool_may_not_exceed_its_ranks_share_of_what_sglang_leaves() -> None:
    """(449 GB - 10 GiB) // 8 ranks, whatever the user reserves."""
    share = (449 * GB - 10 * GIB) // 8
    made = plan("kimi-k2.5", "sglang", f"--hicache-size {share // GB + 1}", tp=8, host_reserve_bytes=0)
    assert codes(made) == ["host_pool_too_big"]
    assert made.host.largest_safe_per_rank_bytes == share // GB * GB


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from([n for n in names() if n != "deepseek-v2-lite"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    memory=st.integers(20, 4000),
    reserve=st.none() | st.integers(0, 100),
    page=st.sampled_from([1, 16, 64]),
)
def test_the_largest_safe_size_is_accepted_and_one_more_refused(
    model: str, tp: int, memory: int, reserve: int | None, page: int
) -> None:
    said = {
        "tp": tp,
        "host_memory_bytes": memory * GB,
        "host_reserve_bytes": None if reserve is None else reserve * GB,
    }
    largest = plan(model, "sglang", f"--page-size {page}", **said).host.largest_safe_per_rank_bytes // GB

    def refused(size: int) -> bool:
        return "host_pool_too_big" in codes(plan(model, "sglang", f"--hicache-size {size} --page-size {page}", **said))

    assert refused(largest + 1)
    if largest:
        assert not refused(largest)
        smaller = largest // 2
        assert not smaller or not refused(smaller)


@settings(max_examples=40, deadline=None)
@given(memory=st.integers(60, 2000), more=st.integers(1, 500))
def test_more_memory_never_allows_less(memory: int, more: int) -> None:
    sizes = [
        plan("qwen3-32b", "sglang", tp=4, host_memory_bytes=total * GB).host.largest_safe_per_rank_bytes
        for total in (memory, memory + more)
    ]
    assert sizes == sorted(sizes)


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(0, 10**11),
    more=st.integers(0, 10**10),
    page=st.sampled_from([1, 16, 64]),
    window=st.sampled_from([0, 4096]),
    state=st.sampled_from([0, 10**7]),
)
def test_a_device_pool_stays_in_its_budget_and_grows_with_it(
    budget: int, more: int, page: int, window: int, state: int
) -> None:
    size = KVBytesPerToken(full_bytes=8192, window_bytes=window, index_bytes=0, state_bytes=state)
    small, large = device_pool(budget, size, page), device_pool(budget + more, size, page)
    assert small.kv_bytes + (small.state_bytes if small.tokens else 0) <= max(budget, 0) + state
    one_state = state // 8192 + page  # one more whole state may take these tokens' place
    assert small.tokens <= large.tokens + (one_state if state else 0)
    assert small.tokens % page == 0


def test_default_fraction_follows_the_gpu_and_the_batch() -> None:
    """80 GiB, TP 8, latent: 512 + 8192 x 1.5 + 1024 + 512 x 2 + 1536 MiB are left."""
    load = WeightLoad(gpu_mib=81920, tp=8, pp=1, attention_dp=1, latent=True, vision=None)
    assert default_static_fraction(load) == round((81920 - 16384) / 81920, 3)
    small = WeightLoad(gpu_mib=24576, tp=4, pp=1, attention_dp=1, latent=False, vision=None)
    # 4,096 tokens a chunk and batches of 160; 50 prefill graphs of 8 MiB
    assert default_static_fraction(small) == round((24576 - (512 + 6144 + 512 + 320 + 50 * 8)) / 24576, 3)


def test_weights_over_the_static_share_name_the_fraction_that_works() -> None:
    made = plan("qwen3-32b", "sglang", "--mem-fraction-static 0.7", gpus="80GB")
    assert codes(made) == ["weights_exceed_static"]
    fraction = float(made.problems[0].fix.split()[1])
    again = plan("qwen3-32b", "sglang", f"--mem-fraction-static {fraction}", gpus="80GB", context=4096)
    assert "weights_exceed_static" not in codes(again)


def test_where_no_fraction_works_it_says_how_many_gpus_would() -> None:
    made = plan("kimi-k2.5", "sglang", tp=8, gpus="8x80GB")
    assert codes(made) == ["no_window"]
    assert "--tp 16" in made.problems[0].fix


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--hicache-mem-layout page_first_direct --hicache-size 2", "flag_conflict", "kernel into direct"),
        ("--hicache-io-backend direct --hicache-size 2", "flag_conflict", "page_first into page_first_direct"),
        (
            "--hicache-mem-layout layer_first --hicache-storage-backend mooncake --hicache-size 2",
            "flag_conflict",
            "layer_first into page_first",
        ),
        ("--device cpu --hicache-size 2", "hicache_kernel_unsupported", "CUDA only"),
    ],
)
def test_what_sglang_rewrites_silently_is_said(flags: str, code: str, words: str) -> None:
    made = plan("smollm2", "sglang", f"--enable-hierarchical-cache {flags}")
    assert any(item.code == code and words in item.message for item in made.warnings)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--enable-hierarchical-cache --disable-radix-cache", "flag_conflict"),
        ("--enable-hicache --enable-lmcache", "flag_conflict"),
        ("--enable-hierarchical-cache --hicache-size 2 --disaggregation-mode decode", "hicache_not_on_decode"),
        ("--enable-linker-mla-dedup", "flag_conflict"),
        ("--enable-linker-mla-dedup --enable-unified-cache-external-linker --hicache-size 2", "flag_conflict"),
        ("--enable-dp-attention", "flag_conflict"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(flags: str, code: str) -> None:
    assert code in codes(plan("smollm2", "sglang", flags))


def test_a_host_pool_no_larger_than_the_device_pool_is_called_useless() -> None:
    made = plan("qwen3-8b", "sglang", "--hicache-size 10", gpus="80GB")
    assert made.fits
    assert "host_pool_smaller_than_device" in warned(made)
    assert "host_pool_smaller_than_device" not in warned(plan("qwen3-8b", "sglang", "--hicache-size 100", gpus="80GB"))


def test_auto_sizing_reduces_the_ratio_to_its_share_of_memory() -> None:
    made = plan("qwen3-8b", "sglang", "--enable-hierarchical-cache", gpus="80GB", host_memory_bytes=64 * GB)
    ratio = next(step.value for step in made.steps if step.key == "hicache_ratio")
    budget = int((64 * GB - 10 * GIB) * 0.8)
    assert ratio == pytest.approx(budget * 0.95 / made.device.kv_bytes)
    assert made.host.total_bytes <= budget
    roomy = plan("qwen3-8b", "sglang", "--enable-hierarchical-cache", gpus="80GB", host_memory_bytes=900 * GB)
    assert next(step.value for step in roomy.steps if step.key == "hicache_ratio") == 2.0


def test_the_sparse_index_has_a_host_pool_outside_the_size() -> None:
    """As one log shows: 153.81 GB of KV and 35.25 GB of index for 3,423,488 tokens of 78 layers."""
    made = plan("glm-5", "sglang", "--hicache-size 60 --page-size 64", tp=8, host_memory_bytes=2000 * GB)
    index = made.host.per_rank_bytes - 60 * GB
    assert index == made.host.per_rank_tokens * 78 * 132


def test_a_window_layers_pool_gets_its_part_of_the_size() -> None:
    made = plan("gemma-3-27b", "sglang", "--hicache-size 20", gpus="2x80GB", tp=2)
    assert made.host.allocated_per_rank_bytes == pytest.approx(20 * GB, rel=0.001)
    full = 10 * 2 * 8 * 128 * 2
    window = 52 * 2 * 8 * 128 * 2
    assert made.host.per_rank_tokens == pytest.approx(20e9 / (full + 0.8 * window), rel=0.001)


def test_states_of_linear_attention_take_their_part_of_the_device() -> None:
    made = plan("qwen3-next-80b-a3b", "sglang", gpus="4x80GB", tp=4)
    budget = made.device.static_bytes - made.device.weights_bytes
    assert made.device.state_bytes == pytest.approx(budget * 0.9 / 1.9, rel=0.01)
    assert made.device.kv_tokens == pytest.approx((budget - made.device.state_bytes) / (12 * 2 * 1 * 256 * 2), rel=0.01)


def test_total_host_cache_becomes_whole_gigabytes_a_rank() -> None:
    made = plan("qwen3-32b", "sglang", tp=4, host_cache_bytes=101 * GB)
    assert list(made.command)[list(made.command).index("--hicache-size") + 1] == "25"
    assert codes(plan("qwen3-32b", "sglang", tp=8, host_cache_bytes=5 * GB)) == ["bad_flag"]


def test_aliases_mean_the_same() -> None:
    long = plan("qwen3-32b", "sglang", "--tensor-parallel-size 4 --enable-hicache --hicache-size=10")
    short = plan("qwen3-32b", "sglang", "--enable-hierarchical-cache --hicache-size 10", tp=4)
    assert (long.tp, long.host) == (short.tp, short.host)


def test_unknown_flags_pass_through_with_their_values() -> None:
    made = plan("smollm2", "sglang", "--log-level debug --trust-remote-code --random-seed -1")
    assert made.command[-5:] == ("--log-level", "debug", "--trust-remote-code", "--random-seed", "-1")


@pytest.mark.parametrize(
    "flags", ["--hicache-size 48GB", "--hicache-size 2.5", "--tp x", "--hicache-write-policy maybe"]
)
def test_a_flag_sglang_would_die_on_is_refused_at_once(flags: str) -> None:
    with pytest.raises(UsageError, match="sglang flag --") as caught:
        plan("smollm2", "sglang", flags)
    assert caught.value.code == "bad_flag"


def test_our_option_and_the_servers_flag_may_not_differ() -> None:
    with pytest.raises(UsageError, match="--tp says 4, the server's own flag says 8"):
        plan("qwen3-32b", "sglang", "--tp-size 8", tp=4)
    assert plan("qwen3-32b", "sglang", "--tp-size 8", tp=8).tp == 8


def test_heads_that_do_not_divide_are_refused_with_the_ranks_that_work() -> None:
    made = plan("smollm2", "sglang", tp=2)
    assert codes(made) == ["tp_not_divisible"]
    assert "1, 3, 9" in made.problems[0].fix


def test_on_a_cpu_sglang_pads_heads_that_do_not_divide() -> None:
    """9 and 3 heads over two ranks become 12 and 4: two KV heads a rank (``configs/update_config.py``)."""
    made = plan("smollm2", "sglang", "--device cpu --max-total-tokens 8192", tp=2)
    assert made.fits
    assert [w.code for w in made.warnings if "12 and 4" in w.message] == ["tp_not_divisible"]
    assert made.kv_bytes_per_token_per_rank == 30 * 2 * 2 * 64 * 2


def test_fp8_kv_halves_the_bytes_and_sparse_latents_keep_scales_and_their_rotary_key() -> None:
    assert plan("qwen3-32b", "sglang", kv_dtype="fp8_e4m3").kv_bytes_per_token == 64 * 2 * 8 * 128
    assert plan("deepseek-v3", "sglang", kv_dtype="fp8_e4m3").kv_bytes_per_token == 61 * 576
    assert plan("deepseek-v3.2", "sglang", kv_dtype="fp8_e4m3").kv_bytes_per_token == 61 * (656 + 132)
    assert plan("deepseek-v3", "sglang", kv_dtype="fp4_e2m1").kv_bytes_per_token == 61 * (288 + 36)


@pytest.mark.parametrize("server", ["embedded", "sglang", "vllm"])
def test_every_plan_survives_its_json(server: str) -> None:
    made = plan("qwen3-8b", server, gpus="2x80GB", tp=2, host_cache_bytes=64 * GB)
    data = json.loads(json.dumps(made.to_json()))
    assert from_json(data) == made
    needed = [
        "fits",
        "server",
        "ranks",
        "kv_bytes_per_token_per_rank",
        "kv_replicated",
        "device",
        "host",
        "command",
        "problems",
        "schema",
    ]
    assert set(needed) <= set(data)
    assert set(data["how"]) >= {"kv_bytes_per_token_per_rank", "host.available_bytes", "device.kv_tokens"}


def box(folder: Path, **looks: object) -> RecordedMachine:
    """A recorded machine of 64 GiB in a control group of 32 GiB, with 1 MiB of locked memory."""
    files = {
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  1048576  1048576  bytes\n",
        "sys/fs/cgroup/memory.max": f"{32 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"active_file {GIB}\ninactive_file {GIB}\n",
    }
    for path, text in files.items():
        (folder / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "files" / path).write_text(text)
    (folder / "looks.json").write_text(json.dumps({"name": "box", **looks}))
    return RecordedMachine(folder)


def test_a_plan_runs_over_a_recorded_machine(tmp_path: Path) -> None:
    """Nothing of this host is read: memory, control group, limits and GPU are the folder's."""
    gpu = {
        "index": 0,
        "uuid": "",
        "name": "H100",
        "total_bytes": 80 * GB,
        "free_bytes": 30 * GB,
        "processes": {"77": 50 * GB},
    }
    machine = box(tmp_path, gpus=[gpu])
    flags = ("--hicache-size", "25", "--hicache-storage-backend", "mooncake")
    made = make_plan(PlanOptions("qwen3-8b", "sglang", server_flags=flags), machine)
    assert made.host.available_bytes == 30 * GIB  # limit - usage + page cache
    assert "host_pool_too_big" in codes(made)
    message = made.problems[0].message
    assert "the control group's limit; the host itself has 64.42 GB" in message
    assert {"gpu_busy", "pin_failed"} <= set(warned(made))
    assert any("pid 77 (50.0 GB)" in item.message for item in made.warnings)


def test_gpus_that_are_too_few_or_uneven_are_said() -> None:
    assert "gpu_too_small" in codes(plan("qwen3-32b", "sglang", tp=4, gpus="2x80GB"))
