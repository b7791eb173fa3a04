"""``--up``: when a server is started again, and when that is given up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from ports import free_port

from benchmarks.lib.modules import module_command, module_env
from forebay.errors import DeadError
from forebay.workload.client import Client
from forebay.workload.concurrency_limit import ConcurrencyLimit
from forebay.workload.generate.restart import ServerRestarter, StartBudget, up_command
from forebay.workload.generate.server_pool import ServerEndpoint, ServerPool
from forebay.workload.target import up_address


def test_starts_are_spaced_and_end_after_five_in_ten_minutes() -> None:
    budget, now, starts = StartBudget(), 0.0, []
    while (delay := budget.delay(now)) is not None:
        now += delay
        starts.append(now)
        budget.started(now)
    assert starts == [0.0, 2.0, 6.0, 14.0, 30.0]
    assert budget.delay(now + 500) is None
    assert budget.delay(600.0) == 0.0  # the first start is ten minutes old


def test_what_is_given_to_up_says_where_it_will_serve(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"server": "vllm", "command": ["vllm", "--port", "8123"]}')
    assert up_address(str(plan)) == "http://127.0.0.1:8123"
    assert up_address(f"{plan} --port 8124") == "http://127.0.0.1:8124"
    assert up_address("smollm2") == "http://127.0.0.1:30000"
    assert up_command("smollm2 --host-cache '2 GB'")[-3:] == ["smollm2", "--host-cache", "2 GB"]


def _starter(folder: Path, port: int) -> list[str]:
    """A command like ``forebay up --detach``: starts a server that outlives it, and ends when that is up."""
    script = folder / "up.py"
    script.write_text(
        "import os, pathlib, subprocess\n"
        f"environment = os.environ | {{'PYTHONPATH': {module_env()['PYTHONPATH']!r}}}\n"
        f"p = subprocess.Popen({module_command('null_server', '--port', str(port))!r}, env=environment,"
        " stdout=subprocess.PIPE, text=True, start_new_session=True)\n"
        f"p.stdout.readline()\npathlib.Path({str(folder / 'pid')!r}).write_text(str(p.pid))\n"
    )
    return [sys.executable, str(script)]


async def test_a_dead_server_is_started_again_and_used_again(tmp_path: Path) -> None:
    port = free_port()
    restarter = ServerRestarter(_starter(tmp_path, port), StartBudget(starts=2, first_delay_s=0.05))
    server = ServerEndpoint(f"http://127.0.0.1:{port}", Client(f"http://127.0.0.1:{port}"), ConcurrencyLimit())
    events: list[str] = []
    pool = ServerPool(
        [server], model=None, restarter=restarter, wait_s=60, on_event=lambda name, *_: events.append(name)
    )
    try:
        assert (await pool.first_ready()).model == "null"
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        pool.mark_down(server, "killed")
        while not server.up:
            await asyncio.sleep(0.02)
        assert (restarter.count, events) == (2, ["server_up", "server_down", "server_up"])
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        pool.mark_down(server, "killed")
        with pytest.raises(DeadError, match="started 2 times"):
            await pool.watch()
    finally:
        await pool.close()
