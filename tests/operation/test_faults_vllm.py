"""The fault matrix on the real vLLM, on this CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fault_suites import Case, Ending, FailedStarts, Serving
from operator_driving import Driver
from operator_peers import peer, real_model

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

_SMALL = ("--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "100000000")


@pytest.fixture(scope="module")
def case() -> Case:
    peer("vllm")
    return Case(
        server="vllm",
        model=real_model(),
        flags=_SMALL,
        engine="VLLM::EngineCore",
        warm_up="init engine (profile",
        bad_flag="--no-such-flag",
        too_long=(("--max-model-len", "100000"), "ctx_too_long_for_model"),
        too_big=(("--kv-cache-memory-bytes", "64000000000"), "host_pool_too_big"),
    )


class TestServing(Serving):
    pass


class TestEnding(Ending):
    pass


class TestFailedStarts(FailedStarts):
    pass


def test_verify_observes_external_hits(case: Case, driver: Driver, tmp_path: Path) -> None:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    up = case.up(driver, "tiers", "--detach", flags=("--kv-transfer-config", json.dumps(connector)))
    rows = {row["name"]: row for row in up.event("verified")["rows"]}
    assert rows["host or disk or external tier"]["status"] == "ok", up.err[-3000:]
    assert rows["same output from loaded pages"]["observed"] == "same"
