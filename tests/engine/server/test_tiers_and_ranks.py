"""Tiers and ranks through the real server: the same tokens wherever the KV came from, and one end for all processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, is_alive, left_behind

pytestmark = pytest.mark.engine

PROMPT = [100 + (7 * i) % 20_000 for i in range(200)]


def answer(server: ServerProcess) -> tuple[list[int], dict[str, int]]:
    """Tokens of a fixed request, and where its prompt was found."""
    made: dict[str, Any] = server.complete(PROMPT, max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)
    return made["choices"][0]["token_ids"], made["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def test_after_a_restart_the_first_request_is_found_on_disk(smollm2: Path, tmp_path: Path) -> None:
    options = [
        *("--served-model-name", "smollm2", "--disk-cache", str(tmp_path / "disk"), "--disk-size", "100MB"),
        *("--host-cache", "64MB", "--load", "always"),
    ]
    first = ServerProcess(str(smollm2), tmp_path / "first.log", *options)
    try:
        tokens, cached = answer(first)
        assert cached == {"device": 0, "host": 0, "disk": 0}
        first.wait_until(lambda: first.metric("forebay_tier_tokens", tier="disk", state="used") >= 192, "pages on disk")
        assert first.end() == 0
    finally:
        first.kill()
    second = ServerProcess(str(smollm2), tmp_path / "second.log", *options)
    try:
        assert answer(second) == (tokens, {"device": 0, "host": 0, "disk": 192})
        assert second.metric("forebay_prompt_tokens_total", source="disk") == 192
        busy = ServerProcess(str(smollm2), tmp_path / "third.log", *options, wait=False)
        assert busy.process.wait(120) == 3
        assert sum(" ERROR " in line for line in busy.text().splitlines()) == 1
    finally:
        second.kill()


def test_three_ranks_serve_as_one_and_end_as_one(smollm2: Path, tmp_path: Path, private_tmp: Path) -> None:
    server = ServerProcess(
        str(smollm2), tmp_path / "log", "--served-model-name", "smollm2", "--tp", "3", "--host-cache", "64MB",
        "--load", "always",
        tmp=private_tmp,
    )  # fmt: skip
    try:
        tokens, _ = answer(server)
        assert answer(server) == (tokens, {"device": 192, "host": 0, "disk": 0})
        server.post("/flush_cache?tier=device")
        assert answer(server) == (tokens, {"device": 0, "host": 192, "disk": 0})
        pools = server.get("/server_info").json()["effective"]["pools"]
        assert pools["device_pool_bytes_total"] == 3 * pools["device_pool_bytes_per_rank"]
        pids = [int(pid) for pid in re.findall(r"INFO worker rank=\d pid=(\d+)", server.text())]
        assert len(pids) == 3
        os.kill(pids[2], signal.SIGKILL)
        assert server.process.wait(30) == 4
        assert not any(map(is_alive, pids))
        errors = [line for line in server.text().splitlines() if " ERROR died" in line]
        assert len(errors) == 1
        assert "was killed by SIGKILL" in errors[0]
    finally:
        server.kill()
    assert not left_behind(private_tmp)
