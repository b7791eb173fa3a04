"""The plan beside the real servers' pools: embedded to the byte, also by the kernel's own figures;
SGLang's host pool to the token.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plan_helpers import GB
from ports import free_port

from forebay.machine import processes
from forebay.machine.interface import HttpFailure
from forebay.machine.local import LocalMachine
from forebay.planning.make_plan import PlanOptions, make_plan
from forebay.planning.plan import Plan
from forebay.servers.install import Installation, find_installation
from forebay.servers.registry import server_named

MACHINE = LocalMachine()
START_S = 420


@dataclass
class Running:
    """A server that answers /health, and its log."""

    url: str
    log: Path
    pid: int

    def get(self, path: str) -> Any:
        return json.loads(MACHINE.http("GET", self.url + path, timeout_s=30).body)


@contextmanager
def started(argv: list[str], port: int, log: Path, env: dict[str, str]) -> Iterator[Running]:
    """Start ``argv`` in a session of its own, wait until it is healthy, and end the whole session afterwards."""
    child = MACHINE.spawn(argv, env={**os.environ, **env}, cwd=None, log_path=str(log))
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert child.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            return MACHINE.http("GET", f"{url}/health", timeout_s=30).ok
        except HttpFailure:
            return False

    try:
        until(healthy)
        yield Running(url, log, child.pid)
    finally:
        everyone = processes.all_processes(MACHINE)
        members = processes.session_members(everyone, child.pid) + processes.descendants(everyone, child.pid)
        identities = {info.pid: info.start_ticks for info in members}
        if child.pid in identities:
            MACHINE.signal(child.pid, signal.SIGTERM, identities[child.pid])
        child.wait(15)
        for pid, start_ticks in identities.items():
            MACHINE.signal(pid, signal.SIGKILL, start_ticks)
        child.wait(15)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, "the server never became ready"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def smollm2() -> str:
    code = "from forebay.engine.model_import.resolve import resolve_model; print(resolve_model('smollm2'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"the small real model cannot be had: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]


def mapped(pids: list[int]) -> list[tuple[int, int]]:
    """(size, resident) bytes of each shared-memory region these processes map, by smaps."""
    found = []
    for pid in pids:
        lines = MACHINE.read(f"/proc/{pid}/smaps").splitlines()
        for number, line in enumerate(lines):
            if re.search(r" (/dev/shm/|/memfd:)", line):
                numbers = re.findall(r"(?m)^(Size|Rss):\s+(\d+) kB", "\n".join(lines[number : number + 6]))
                values = {name: int(kilobytes) * 1024 for name, kilobytes in numbers}
                found.append((values["Size"], values["Rss"]))
    return found


def region_files(pid: int) -> set[tuple[int, int]]:
    """(inode, bytes allocated) of the shared-memory files a process holds, as /dev/shm itself counts them."""
    found = set()
    for name in MACHINE.listdir(f"/proc/{pid}/fd"):
        try:
            if MACHINE.readlink(f"/proc/{pid}/fd/{name}").startswith(("/dev/shm/", "/memfd:")):
                numbers = MACHINE.stat(f"/proc/{pid}/fd/{name}")
                found.add((numbers.inode, numbers.allocated_bytes))
        except FileNotFoundError:
            continue
    return found


@pytest.mark.engine
def test_the_embedded_server_has_the_planned_pools_to_the_byte(smollm2: str, tmp_path: Path) -> None:
    options = PlanOptions(smollm2, device_cache_bytes=70_000_000, host_cache_bytes=120_000_001)
    made: Plan = make_plan(options, MACHINE)
    assert made.fits
    port = free_port()
    argv = [sys.executable, "-m", "forebay.cli", *made.command[1:], "--port", str(port)]
    with started(argv, port, tmp_path / "serve.log", {}) as server:
        info = server.get("/server_info")["effective"]
        pools = info["pools"]
        assert pools["device_pool_tokens"] == made.device.kv_tokens
        assert pools["device_pool_bytes_per_rank"] == made.device.kv_bytes
        assert pools["host_pool_tokens"] == made.host.distinct_tokens
        assert pools["host_pool_bytes_total"] == made.host.total_bytes
        assert info["kv_bytes_per_token"]["per_rank"] == made.kv_bytes_per_token_per_rank
        assert info["context_length"] == made.context_length
        _check_kernel(made, info, server)


def _check_kernel(made: Plan, info: dict[str, Any], server: Running) -> None:
    """smaps and /dev/shm say the same as plan and server: whole pages of memory, all of them resident."""
    page = os.sysconf("SC_PAGE_SIZE")
    region = -(-made.host.total_bytes // page) * page
    everyone = processes.all_processes(MACHINE)
    members = [server.pid, *(item.pid for item in processes.descendants(everyone, server.pid))]
    regions = [(size, resident) for size, resident in mapped(members) if size == region]
    assert regions == [(region, region)] * made.ranks
    held = set().union(*(region_files(pid) for pid in members))
    assert [size for _, size in held if size == region] == [region]
    resident = sum(item.rss_bytes for item in everyone if item.pid in members)
    assert made.device.kv_bytes is not None
    assert resident >= made.device.kv_bytes + made.host.total_bytes + info["weight_bytes_per_rank"]
    if info["kernels"]["name"] == "native":
        assert info["weight_bytes_per_rank"] == made.weights_per_rank_bytes


@pytest.fixture(scope="module")
def small_llama(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama whose heads divide over two ranks,
    with the real model's tokenizer and no weights (--load-format dummy).
    """
    folder = tmp_path_factory.mktemp("small-llama")
    for file in Path(smollm2).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (folder / file.name).symlink_to(file)
    config = json.loads((Path(smollm2) / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 1024, "head_dim": 64}))
    return str(folder)


def _installed() -> Installation:
    """SGLang in its own environment, made by the project's recipe where it is missing."""
    recipe = Path(__file__).parents[2] / "scripts" / "peers" / "install.py"
    done = subprocess.run([sys.executable, str(recipe), "sglang"], capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        pytest.skip(f"sglang cannot be installed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return find_installation("sglang", server_named("sglang").distributions)


@pytest.mark.peers
@pytest.mark.parametrize(("tp", "page"), [(1, 16), (2, 64)])
def test_sglang_builds_the_planned_host_pool_to_the_token(small_llama: str, tp: int, page: int, tmp_path: Path) -> None:
    server, installation = server_named("sglang"), _installed()
    flags = (
        "--device cpu --mem-fraction-static 0.3 --max-total-tokens 4100 --hicache-size 1 --hicache-io-backend direct "
        f"--page-size {page} --load-format dummy --context-length 2048 --disable-cuda-graph"
    )
    options = PlanOptions(
        small_llama, "sglang", installation.version, tp=tp, host_reserve_bytes=GB, server_flags=tuple(flags.split())
    )
    made = make_plan(options, MACHINE)
    if not made.fits:
        pytest.skip(f"no room for it here now: {made.problems[0].message}")
    port = free_port()
    command = [*made.command, "--host", "127.0.0.1", "--port", str(port)]
    launch = server.finalize_command(command, made.env, installation, gpus=0)
    with started(list(launch.argv), port, tmp_path / "sglang.log", dict(launch.env)) as running:
        text = running.log.read_text(errors="replace")
        info = running.get("/server_info")
    device = {int(tokens) for tokens in re.findall(r"KV Cache is allocated\..*?#tokens: (\d+)", text)}
    host = re.findall(r"Allocating kv hierarchical KV host pool: (\d+) tokens, ([\d.]+) GB", text)
    assert device == {made.device.kv_tokens} == {4100 // page * page}
    assert len(host) == tp  # one pool a rank: the size is per rank
    assert {int(tokens) for tokens, _ in host} == {made.host.per_rank_tokens}
    assert {f"{made.host.allocated_per_rank_bytes / 1e9:.2f}"} == {size for _, size in host}
    assert info["max_total_num_tokens"] == made.device.kv_tokens
