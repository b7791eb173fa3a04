"""Many at once: the same tokens as alone, and hanging up gives everything back."""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.engine


def random_request(rng: random.Random) -> dict[str, Any]:
    """Ragged lengths over a few shared prefixes; greedy or seeded; some with penalties."""
    family = random.Random(rng.randrange(3))
    prefix = [family.randrange(100, 40_000) for _ in range(rng.choice([0, 40, 150]))]
    request: dict[str, Any] = {
        "prompt": prefix + [rng.randrange(100, 40_000) for _ in range(rng.randrange(1, 60))],
        "max_tokens": rng.randrange(1, 20),
        "temperature": rng.choice([0, 0.8]),
        "seed": rng.randrange(1000),
        "ignore_eos": True,
        "logprobs": 0,
    }
    if rng.random() < 0.3:
        request["frequency_penalty"] = 0.7
    return request


def tokens_and_logprobs(answer: dict[str, Any]) -> tuple[list[str], list[float]]:
    logprobs = answer["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def test_a_crowd_gets_exactly_what_each_gets_alone(server: ServerProcess) -> None:
    rng = random.Random(11)
    requests = [random_request(rng) for _ in range(24)]
    server.post("/flush_cache")
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: tokens_and_logprobs(server.complete(**request)), requests))
    for request, got in zip(requests, together, strict=True):
        server.post("/flush_cache")
        assert tokens_and_logprobs(server.complete(**request)) == got
    assert_all_pages_free(server)


def test_preemption_changes_no_token(server: ServerProcess) -> None:
    """Five sequences whose prompts fit the pool together, but not with what they generate."""
    pool = server.get("/server_info").json()["effective"]["pools"]["device_pool_tokens"]
    rng = random.Random(5)
    length = pool // 5 - 30
    requests = [
        {"prompt": [rng.randrange(100, 40_000) for _ in range(length)], "max_tokens": 90, "ignore_eos": True,
         "temperature": 0, "logprobs": 0}
        for _ in range(5)
    ]  # fmt: skip
    before = server.metric("forebay_preemptions_total")
    with ThreadPoolExecutor(5) as pool_:
        together = list(pool_.map(lambda request: tokens_and_logprobs(server.complete(**request)), requests))
    assert server.metric("forebay_preemptions_total") > before
    server.post("/flush_cache")
    for index in (0, 4):
        assert tokens_and_logprobs(server.complete(**requests[index])) == together[index]


def hang_up_after(server: ServerProcess, body: dict[str, Any], events: int) -> None:
    """Open a stream, read some events, close the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"model": "smollm2", "stream": True, **body}).encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        seen = b""
        while seen.count(b"data: ") < events:
            seen += connection.recv(65536)


def assert_all_pages_free(server: ServerProcess) -> None:
    server.wait_until(
        lambda: (
            server.metric("forebay_requests") == 0
            and server.metric("forebay_tier_tokens", tier="device", state="held") == 0
            and server.metric("forebay_cache_leases") == 0
        ),
        "all pages given back",
    )


def test_hanging_up_frees_the_pages(server: ServerProcess) -> None:
    body = {"prompt": "A very long story", "max_tokens": 1000, "ignore_eos": True, "n": 2}
    cancelled = server.metric("forebay_requests_finished_total", reason="cancelled")
    generated = server.metric("forebay_generated_tokens_total")
    hang_up_after(server, body, events=3)
    assert_all_pages_free(server)
    assert server.metric("forebay_requests_finished_total", reason="cancelled") == cancelled + 2
    assert server.metric("forebay_generated_tokens_total") - generated < 400


def test_hanging_up_while_waiting_for_the_whole_answer(server: ServerProcess) -> None:
    cancelled = server.metric("forebay_requests_finished_total", reason="cancelled")
    body = {"prompt": "A very long story", "max_tokens": 1000, "ignore_eos": True, "stream": False}
    thread = threading.Thread(target=hang_up_without_answer, args=(server, body))
    thread.start()
    thread.join()
    server.wait_until(
        lambda: server.metric("forebay_requests_finished_total", reason="cancelled") == cancelled + 1, "a cancellation"
    )
    assert_all_pages_free(server)


def hang_up_without_answer(server: ServerProcess, body: dict[str, Any]) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"model": "smollm2", **body}).encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        server.wait_until(lambda: server.metric("forebay_requests") > 0, "the request runs")


def test_a_stop_string_ends_the_sequence_in_the_engine_too(server: ServerProcess) -> None:
    full = server.complete("One, two, three,", max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    generated = server.metric("forebay_generated_tokens_total")
    cut = server.complete("One, two, three,", max_tokens=1000, temperature=0, ignore_eos=True, stop=full[6:9])
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert_all_pages_free(server)
    assert server.metric("forebay_generated_tokens_total") - generated < cut["usage"]["completion_tokens"] + 200


def test_streams_come_token_by_token(server: ServerProcess) -> None:
    """The first event arrives long before the last: nothing is kept back to be sent at once."""
    body = {"model": "smollm2", "prompt": "Tell me", "max_tokens": 60, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        times = [time.monotonic() for line in answer if line.startswith(b"data: {")]
    steps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert len(times) > 30
    assert steps[len(steps) // 2] > (times[-1] - times[0]) / len(steps) / 10
