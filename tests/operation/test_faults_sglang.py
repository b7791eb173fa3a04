"""The fault matrix on the real SGLang, on this CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fault_suites import Case, Ending, FailedStarts, Serving
from operator_driving import Driver
from operator_peers import peer, real_model

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

_SMALL = ("--mem-fraction-static", "0.3", "--max-total-tokens", "4096", "--page-size", "64")
_HICACHE = ("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-mem-layout", "page_first")


@pytest.fixture(scope="module")
def case() -> Case:
    peer("sglang")
    return Case(
        server="sglang",
        model=real_model(),
        flags=_SMALL,
        engine="sglang::scheduler",
        warm_up="Started server process",
        bad_flag="--no-such-flag",
        too_long=(("--context-length", "100000"), "ctx_too_long_for_model"),
        too_big=(("--enable-hierarchical-cache", "--hicache-size", "1000"), "host_pool_too_big"),
        pause=("/pause_generation", "/continue_generation"),
    )


class TestServing(Serving):
    pass


class TestEnding(Ending):
    pass


class TestFailedStarts(FailedStarts):
    pass


def _rows(up: object) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in up.event("verified")["rows"]}  # type: ignore[attr-defined]


def test_verify_observes_host_hits_and_a_rewritten_layout(case: Case, driver: Driver) -> None:
    up = case.up(driver, "tiers", "--detach", flags=_HICACHE)
    rows = _rows(up)
    assert rows["host tier"]["status"] == "ok", up.err[-3000:]
    assert rows["same output from loaded pages"]["observed"] == "same"
    assert rows["memory layout"] | {"evidence": "", "fix": ""} == {
        "name": "memory layout", "asked": "page_first", "effective": "page_first_direct", "observed": None,
        "status": "differs", "evidence": "", "cause": None, "fix": "",
    }  # fmt: skip
    assert up.code == 7


@pytest.mark.soak
def test_verify_at_two_ranks(case: Case, driver: Driver, tmp_path: Path) -> None:
    """SmolLM2's nine heads do not divide; this one computes long enough for loading back to be sooner."""
    from tiny_models import make_tiny

    model = make_tiny(
        "llama", tmp_path / "model", decisive=True, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    two = replace(case, model=model)
    up = two.up(driver, "two", "--detach", "--probe-seconds", "120", flags=("--tp-size", "2", *_HICACHE[:3]))
    rows = _rows(up)
    assert rows["host tier"]["status"] == "ok", up.err[-3000:]
    assert rows["ranks"]["effective"] == "2"
    assert rows["same output from loaded pages"]["observed"] == "same", rows
    record = driver.record("two")
    engines = [name for name in record["member_names"].values() if case.engine in name]
    assert len(engines) == 2, record["member_names"]
    assert up.code == 0, up.told


@pytest.mark.soak
@pytest.mark.parametrize(
    ("flags", "row", "status", "code"),
    [
        ((), "lower tiers", "off", 0),
        (("--max-total-tokens", "60000", *_HICACHE[:3]), "host pool larger than device pool", "differs", 7),
    ],
    ids=["off", "useless"],
)
def test_verify_of_other_shapes(
    case: Case, driver: Driver, flags: tuple[str, ...], row: str, status: str, code: int
) -> None:
    up = case.up(driver, "shape", "--detach", "--probe-seconds", "120", flags=flags)
    assert _rows(up)[row]["status"] == status, up.err[-3000:]
    assert up.code == code
