"""The model of the story, small: `forebay up` on a random Kimi-K2.5 with two ranks and a host tier,
and what it promised.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from tiny_models import make_tiny, quantize_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def kimi_folder(folder: Path) -> Path:
    """As published: INT4 routed experts, the rest bf16, the routers' biases fp32, a vision tower beside it."""
    from safetensors.torch import load_file, save_file

    quantize_tiny(make_tiny("kimi_k25", folder, n_routed_experts=16), "int4", experts_only=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.to(torch.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


class Forebay:
    """The command line with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "FOREBAY_HOME": str(self.home)}
        command = [sys.executable, "-m", "forebay.cli", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


def region_memory(pid: int, size: int) -> tuple[int, int]:
    """(resident, proportional) bytes of the shared region of this size in a process, by smaps."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    for found in re.finditer(r"(?s) /dev/shm/[^\n]*\nSize: +(\d+) kB.*?Rss: +(\d+) kB\nPss: +(\d+) kB", text):
        mapped, resident, proportional = (int(number) * 1024 for number in found.groups())
        if mapped == size:
            return resident, proportional
    raise AssertionError(f"process {pid} maps no shared region of {size:,} bytes")


def test_plan_and_actual_agree_to_the_byte_and_the_pool_is_held_once(tmp_path: Path) -> None:
    folder, forebay, port = kimi_folder(tmp_path / "kimi-k2.5-tiny"), Forebay(tmp_path / "home"), free_port()
    up = forebay(
        "up", str(folder), "--tp", "2", "--host-cache", "1GB", "--port", str(port), "--name", "kimi",
        "--detach", "--json"
    )  # fmt: skip
    try:
        assert up.returncode == 0, f"{up.stderr}\n{up.stdout[-3000:]}"
        run = tmp_path / "home" / "runs" / "kimi"
        plan = json.loads((run / "plan.json").read_text())
        info = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=30).read())[
            "effective"
        ]
        _check_plan(plan, info)
        _check_verified([json.loads(line) for line in up.stdout.splitlines()])
        _check_region(plan, (run / "server.log").read_text())
    finally:
        down = forebay("down", "kimi")
    assert down.returncode == 0, down.stdout + down.stderr


def _check_plan(plan: dict[str, Any], info: dict[str, Any]) -> None:
    pools = info["pools"]
    assert info["weight_bytes_per_rank"] == plan["weights_per_rank_bytes"]
    assert plan["weights_bytes"] < 2 * plan["weights_per_rank_bytes"]  # latents, norms and routers are on both ranks
    assert info["kv_bytes_per_token"] == {"one_copy": 3 * (64 + 32) * 2, "per_rank": 3 * (64 + 32) * 2}
    assert pools["device_pool_bytes_per_rank"] == plan["device"]["kv_bytes"]
    assert pools["device_pool_tokens"] == plan["device"]["kv_tokens"] == plan["device"]["distinct_tokens"]
    assert pools["host_pool_bytes_total"] == plan["host"]["total_bytes"]
    assert pools["host_pool_tokens"] == plan["host"]["distinct_tokens"]


def _check_verified(events: list[dict[str, Any]]) -> None:
    verified = next(event for event in events if event["event"] == "verified")
    assert verified["in_effect"], verified
    rows = {row["name"]: row for row in verified["rows"]}
    assert rows["host tier"]["status"] == "ok"
    assert int(rows["host tier"]["observed"].split()[0]) > 0
    assert rows["same output from loaded pages"]["observed"] == "same"


def _check_region(plan: dict[str, Any], log: str) -> None:
    """All of the pool is resident, and the ranks' shares of it add up to one pool."""
    page = os.sysconf("SC_PAGE_SIZE")
    size = -(-plan["host"]["total_bytes"] // page) * page
    pids = [int(pid) for pid in re.findall(r"INFO worker rank=\d pid=(\d+)", log)]
    assert len(pids) == 2
    memory = [region_memory(pid, size) for pid in pids]
    assert max(resident for resident, _ in memory) == size
    assert min(resident for resident, _ in memory) > 0  # the other rank reads it too
    assert abs(sum(proportional for _, proportional in memory) - size) <= 2 * 1024  # Pss is in whole kB
