"""The embedded server's plan: the same functions its engine calls, so the numbers are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import GB, GIB, codes, plan, warned

from forebay.hostmemory.cgroups import Cgroup
from forebay.kv import pool_sizes as embedded
from forebay.kv.geometry_spec import kv_spec
from forebay.kv.spec import KVSpec
from forebay.machine.facts import MachineFacts
from forebay.machine.memory import HostMemory, ShmSpace
from forebay.model.catalogue import find
from forebay.model.families import read_geometry
from forebay.model.source import resolve
from forebay.planning.embedded.plan import plan_embedded
from forebay.planning.make_plan import PlanOptions, _room
from forebay.planning.plan import Plan
from forebay.planning.request import PlanRequest


def spec(name: str, page: int = 16) -> KVSpec:
    entry = find(name)
    assert entry is not None
    return kv_spec(read_geometry(entry.config), page)


def test_device_pages_are_the_total_over_the_ranks() -> None:
    page = 16 * 23_040
    assert embedded.device_pages(spec("smollm2"), 1, GIB) == GIB // page
    assert embedded.device_pages(spec("smollm2"), 3, GIB) == GIB // page
    # nine ranks share three KV heads: each head is on three of them
    assert embedded.device_pages(spec("smollm2"), 9, GIB) == GIB // (3 * page)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["smollm2", "gemma-3-4b", "kimi-k2.5", "gpt-oss-20b"]),
    total=st.integers(10**6, 10**12),
    page=st.sampled_from([1, 16, 64]),
)
def test_host_pages_fill_the_budget_and_never_exceed_it(name: str, total: int, page: int) -> None:
    page_spec = spec(name, page)
    pages = embedded.host_pages(page_spec, total)
    used = embedded.host_region_bytes(page_spec, pages) - embedded.STATUS_BYTES
    assert used <= total
    assert total - used <= sum(page_spec.page_bytes(group) for group in range(len(page_spec.groups)))


def test_a_window_group_gets_pages_for_its_window_only() -> None:
    window, full = embedded.host_pages(spec("gemma-3-4b"), 10 * GB)
    assert window / full == pytest.approx((1024 + 16) / 4096, rel=0.001)


def test_replicated_kv_is_held_once_for_the_node() -> None:
    made = plan("kimi-k2.5", "embedded", tp=8, host_cache_bytes=48 * GB, host_memory_bytes=2000 * GB)
    assert made.kv_replicated
    assert made.host.distinct_tokens == pytest.approx(48e9 / 70_272, rel=0.001)
    assert made.host.copies == 1


def test_it_refuses_what_the_host_cannot_hold_and_names_what_it_can() -> None:
    made = plan("smollm2", "embedded", host_cache_bytes=30 * GB, host_memory_bytes=24 * GB)
    assert codes(made) == ["host_pool_too_big"]
    size = int(made.problems[0].fix.split()[1].removesuffix("MB")) * 10**6
    assert plan("smollm2", "embedded", host_cache_bytes=size, host_memory_bytes=24 * GB).fits
    assert not plan("smollm2", "embedded", host_cache_bytes=size + 10**6, host_memory_bytes=24 * GB).fits


def on(memory: HostMemory, host_cache: int) -> Plan:
    facts = MachineFacts(1, "box", 0.0, 2, memory, ())
    room = _room(PlanOptions("smollm2"), facts)
    return plan_embedded(PlanRequest(resolve("smollm2"), "embedded", "0.1.0", room, host_cache_bytes=host_cache))


def test_a_control_group_below_the_host_is_named_as_the_limit() -> None:
    group = Cgroup(2, "/sys/fs/cgroup", 4 * GIB, GIB, 0)
    made = on(HostMemory(64 * GIB, 60 * GIB, 0, 0, group, None, None, ()), 8 * GB)
    assert codes(made) == ["host_pool_too_big"]
    assert "control group's limit" in made.problems[0].message


def test_dev_shm_smaller_than_the_tier_is_refused_though_there_is_memory() -> None:
    made = on(HostMemory(64 * GIB, 60 * GIB, 0, 0, None, ShmSpace(64 * 2**20, 60 * 2**20), None, ()), 8 * GB)
    assert codes(made) == ["shm_too_small"]
    assert "--host-cache 62MB" in made.problems[0].fix


def test_a_context_larger_than_the_pool_is_refused_and_a_default_one_shrinks() -> None:
    made = plan("smollm2", "embedded", device_cache_bytes=50 * 10**6, context=8192)
    assert codes(made) == ["ctx_too_long_for_kv"]
    assert plan("smollm2", "embedded", device_cache_bytes=50 * 10**6).fits


def test_a_device_cache_without_room_for_a_page_says_how_large_one_is() -> None:
    made = plan("smollm2", "embedded", device_cache_bytes=1000)
    assert "no_window" in codes(made)


def test_linear_attention_is_another_servers_business() -> None:
    assert "unsupported_architecture" in codes(plan("qwen3-next-80b-a3b", "embedded", host_memory_bytes=900 * GB))


def test_a_host_tier_no_larger_than_the_device_pool_is_called_useless() -> None:
    assert "host_pool_smaller_than_device" in warned(plan("smollm2", "embedded", host_cache_bytes=GB))


def test_the_servers_own_flags_are_read_with_their_units() -> None:
    made = plan("smollm2", "embedded", "--page-size 64 --host-cache 2GB --device-cache 256MiB --log-format json")
    assert made.page_size == 64
    assert made.host.total_bytes == pytest.approx(2 * GB, rel=0.002)
    assert made.device.kv_tokens == 256 * 2**20 // (64 * 23_040) * 64
    assert made.command[-2:] == ("--log-format", "json")


def test_a_gguf_file_is_planned_as_the_bf16_it_becomes(tmp_path: Path) -> None:
    from test_gguf_file import write_small

    path = write_small(tmp_path)
    made = plan(str(path), "embedded")
    attention = 2 * (2 * 64 * 64 + 2 * 64 * 32)
    assert made.weights_bytes == 2 * (32 * 64 + attention + 2 * 3 * 64 * 128)
    assert made.weights_per_rank_bytes == made.weights_bytes  # the tied output matrix is the embeddings
