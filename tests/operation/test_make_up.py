"""`make up` as it stands in the Makefile: a real answer, a second one beside it, and nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess

import pytest
from operator_driving import REPO, Driver, assert_nothing_left, stranger, until
from operator_peers import real_model
from ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
NAME = "smollm2-embedded"


def make_up(first_port: int) -> list[str]:
    """The recipe's words after `forebay`, on ports of this test."""
    recipe = re.search(
        r"^up:.*\n\t@exec \$\(BIN\)/forebay (?P<words>.+)$", (REPO / "Makefile").read_text(), re.MULTILINE
    )
    assert recipe is not None
    words = shlex.split(recipe["words"])
    words[words.index("--port") + 1] = f"{first_port}-{first_port + 9}"
    return words


def until_it_serves(up: subprocess.Popen[str]) -> str:
    """What it said on stderr until it had answered and only serves."""
    assert up.stderr is not None
    said = ""
    for line in up.stderr:
        said += line
        if "serving until Ctrl-C" in line:
            return said
    raise AssertionError(f"it ended with {up.wait()}:\n{said[-3000:]}")


def rest(up: subprocess.Popen[str]) -> tuple[str, str]:
    """What else it says on stdout and stderr until its end."""
    assert up.stderr is not None
    assert up.stdout is not None
    last = up.stderr.read()
    up.wait(timeout=60)
    return up.stdout.read(), last


def test_make_up_answers_beside_another_and_leaves_nothing(driver: Driver) -> None:
    real_model()
    port = free_port()
    with stranger(port):
        first = driver.start(*make_up(port))
        said = [until_it_serves(first)]
        second = driver.start(*make_up(port))
        said.append(until_it_serves(second))
    records = [driver.record(NAME), driver.record(f"{NAME}-2")]
    assert len({port, *(record["port"] for record in records)}) == 3, "each has a port of its own"
    os.killpg(first.pid, signal.SIGINT)
    second.terminate()
    for up, record, text in zip((first, second), records, said, strict=True):
        out, last = rest(up)
        assert up.returncode == 130, last
        assert "Paris" in out, out
        assert f"curl -s http://127.0.0.1:{record['port']}/v1/chat/completions" in text
        assert "processes: none is left" in last
        assert driver.record(record["name"])["state"] == "stopped"
        assert_nothing_left(driver, record["name"], [int(pid) for pid in record["member_names"]])


@pytest.mark.parametrize("stage", ["launched", "loading"])
def test_ctrl_c_while_it_starts_leaves_nothing(driver: Driver, stage: str) -> None:
    up = driver.start(*make_up(free_port()))
    assert until(lambda: any(event.get("stage") == stage for event in driver.events(NAME)), 60)
    os.killpg(up.pid, signal.SIGINT)
    _, last = rest(up)
    assert up.returncode == 130, last
    assert "processes: none is left" in last
    assert_nothing_left(driver, NAME, [int(pid) for pid in driver.record(NAME)["member_names"]])
