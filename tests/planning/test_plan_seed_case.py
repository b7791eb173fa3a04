"""The story this project began with: Kimi-K2.5 on eight ranks, and 300 "GB" of host cache that were 2.4 TB."""

from __future__ import annotations

import pytest
from plan_helpers import GB, codes, plan, warned


def kimi(size: int, memory: int = 449, reserve: int | None = None, **options: object) -> object:
    reserve_bytes = None if reserve is None else reserve * GB
    flags = f"--hicache-size {size}"
    said = {"tp": 8, "host_memory_bytes": memory * GB, "host_reserve_bytes": reserve_bytes, **options}
    return plan("kimi-k2.5", "sglang", flags, **said)


def test_three_hundred_a_rank_is_refused_with_the_sum() -> None:
    made = kimi(300, gpus="8x141GB")
    assert not made.fits
    assert codes(made) == ["host_pool_too_big"]
    assert "8 × 300 GB = 2,400 GB against 449 GB" in made.problems[0].message
    assert made.host.total_bytes == 2400 * GB


def test_the_size_it_names_is_accepted_and_one_more_is_refused() -> None:
    largest = kimi(300).host.largest_safe_per_rank_bytes // GB
    assert kimi(300).problems[0].fix == f"--hicache-size {largest}"
    assert kimi(largest).fits
    assert codes(kimi(largest + 1)) == ["host_pool_too_big"]


def test_with_forty_reserved_of_445_the_largest_lies_in_48_to_50_and_48_is_accepted() -> None:
    made = kimi(48, memory=445, reserve=40)
    assert made.fits
    assert 48 <= made.host.largest_safe_per_rank_bytes // GB <= 50
    assert made.host.total_bytes == 384 * GB


def test_it_says_what_nobody_noticed_eight_pools_hold_the_same_tokens() -> None:
    made = kimi(48)
    assert made.kv_replicated
    assert (made.kv_bytes_per_token_per_rank, made.kv_bytes_per_token) == (70_272, 70_272)
    assert made.host.distinct_bytes == 48 * GB
    assert made.host.distinct_tokens == pytest.approx(48e9 / 70_272, abs=1)
    text = " ".join(item.message + " " + item.fix for item in made.warnings)
    assert "384 GB keep 48 GB of distinct cache" in text
    values = {step.key: step.value for step in made.steps}
    assert values["host.tokens_if_stored_once"] == 384 * GB // 70_272
    assert values["host.tokens_with_dp_attention"] == 8 * made.host.per_rank_tokens


def test_dp_attention_keeps_other_tokens_on_each_rank() -> None:
    made = plan("kimi-k2.5", "sglang", "--hicache-size 48 --enable-dp-attention --dp-size 8", tp=8)
    assert not made.kv_replicated
    assert made.host.distinct_tokens == 8 * made.host.per_rank_tokens


def test_the_command_can_be_run_as_it_is() -> None:
    command = list(kimi(48).command)
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "moonshotai/Kimi-K2.5"]
    assert command[command.index("--tp-size") + 1] == "8"
    assert command[command.index("--hicache-size") + 1] == "48"
    assert "--enable-hierarchical-cache" in command
    assert "flag_conflict" in warned(kimi(48))  # it was added, and said so
