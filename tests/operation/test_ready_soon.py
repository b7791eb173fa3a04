"""How soon "ready" is said: beside a bare client that polls every 50 ms. A soak test, because it measures a time."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable

import pytest
from fault_suites import Case
from operator_driving import Driver
from operator_peers import peer, real_model
from ports import free_port

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.peers, pytest.mark.timeout(900)]

_FLAGS = {
    "embedded": (),
    "sglang": ("--mem-fraction-static", "0.3", "--max-total-tokens", "4096"),
    "vllm": ("--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "100000000"),
}


def _health(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
        return bool(answer.status == 200)


def _token(port: int) -> bool:
    base = f"http://127.0.0.1:{port}/v1"
    with urllib.request.urlopen(f"{base}/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bool(answer.status == 200)


@pytest.mark.parametrize(("server", "ask"), [("embedded", _token), ("sglang", _health), ("vllm", _token)])
def test_ready_is_said_within_300_ms_of_a_bare_client(server: str, ask: Callable[[int], bool], driver: Driver) -> None:
    if server != "embedded":
        peer(server)
    port, first = free_port(), []
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            try:
                if ask(port):
                    first.append(time.time())
                    return
            except (OSError, ValueError, LookupError):
                pass
            time.sleep(0.05)

    client = threading.Thread(target=poll)
    client.start()
    case = Case(server, real_model(), _FLAGS[server], "", "", "", ((), ""), ((), ""))
    try:
        assert case.up(driver, "soon", "--detach", "--no-verify", port=port).code == 0
    finally:
        done.set()
        client.join()
    said = next(event["at"] for event in driver.events("soon") if event["event"] == "ready")
    print(f"\n{server}: ready was said {said - first[0]:+.3f} s after the client's first success")
    assert said - first[0] <= 0.3
