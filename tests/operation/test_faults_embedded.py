"""The fault matrix on the embedded server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fault_suites import Case, Ending, FailedStarts, Serving
from operator_driving import Driver, assert_nothing_left
from operator_peers import real_model
from ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(
        server="embedded",
        model=real_model(),
        flags=("--device-cache", "60MB", "--host-cache", "200MB"),
        engine="forebay.engine.worker.process",
        warm_up='name="warming up"',
        bad_flag="--no-such-flag",
        too_long=(("--context-length", "100000"), "ctx_too_long_for_model"),
        too_big=(("--host-cache", "900GB"), "host_pool_too_big"),
    )


class TestServing(Serving):
    pass


class TestEnding(Ending):
    pass


class TestFailedStarts(FailedStarts):
    pass


def test_a_saved_plan_runs_and_ctrl_c_in_the_foreground_is_down(case: Case, driver: Driver, tmp_path: Path) -> None:
    planned = driver("plan", str(case.model), "--json", "--", *case.flags)
    assert planned.code == 0, planned.told
    saved = tmp_path / "plan.json"
    saved.write_text(planned.out)
    refused = driver("up", str(saved), "--tp", "2")
    assert refused.code == 2
    up = driver.start("up", str(saved), "--name", "front", "--port", str(free_port()), "--no-verify", "--json")
    try:
        assert up.stdout is not None
        for line in up.stdout:
            if '"ready"' in line and '"event": "ready"' in line:
                break
        pids = [int(pid) for pid in driver.record("front")["member_names"]]
        os.killpg(up.pid, signal.SIGINT)
        up.communicate(timeout=90)
    finally:
        up.kill()
    assert up.returncode == 130
    assert driver.record("front")["state"] == "stopped"
    assert_nothing_left(driver, "front", pids)


def test_verify_sees_the_host_tier_and_a_useless_one(case: Case, driver: Driver) -> None:
    good = case.up(driver, "tiers", "--detach")
    assert good.code == 0, good.told
    rows = {row["name"]: row for row in good.event("verified")["rows"]}
    assert rows["host tier"]["status"] == "ok"
    assert rows["same output from loaded pages"]["observed"] == "same"
    assert driver("down", "tiers").code == 0
    useless = driver("up", str(case.model), "--name", "useless", "--port", str(free_port()), "--json", "--detach",
                     "--", "--device-cache", "200MB", "--host-cache", "60MB")  # fmt: skip
    assert useless.code == 7, useless.told
    rows = {row["name"]: row for row in useless.event("verified")["rows"]}
    assert rows["host pool larger than device pool"]["status"] == "differs"
    assert rows["host pool larger than device pool"]["cause"] == "host_pool_smaller_than_device"
