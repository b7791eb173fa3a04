"""Requests that no server can answer as asked: each gets an answer that names the field, and the worker goes on."""

from __future__ import annotations

from typing import Any

import pytest
from server_process import ServerProcess
from tiny_models import VOCAB

pytestmark = pytest.mark.engine


def generate(server: ServerProcess, **options: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, **options})
    assert answer.status == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


def test_end_tokens_outside_the_vocabulary_are_dropped_once_at_load(tiny_server: ServerProcess) -> None:
    """The checkpoint names 512 and 612 as end tokens; min_tokens would ban them from logits that have 512 columns."""
    assert generate(tiny_server, min_tokens=3, max_tokens=5)["usage"]["completion_tokens"] >= 3
    ignored = tiny_server.wait_for(r"WARNING end_tokens ignored=(\S+)")[1]
    assert ignored == f"{VOCAB},{VOCAB + 100}"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a <outside> b"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<outside>"}]}, "messages"),
        ("/v1/completions", {"prompt": [VOCAB]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ],
)
def test_a_token_without_an_embedding_is_refused(
    path: str, body: dict[str, Any], param: str, tiny_server: ServerProcess
) -> None:
    answer = tiny_server.post(path, {"model": "tiny", **body})
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-6, 2.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 5}])
def test_extreme_sampling_values_give_tokens(
    penalty: float, options: dict[str, Any], tiny_server: ServerProcess
) -> None:
    for temperature in (1e-5, 1.0, 2.0):
        made = generate(tiny_server, temperature=temperature, repetition_penalty=penalty, max_tokens=4, **options)
        assert made["usage"]["completion_tokens"] >= 1


def test_probes_are_not_counted_as_requests(tiny_server: ServerProcess) -> None:
    names = (
        "forebay_time_to_first_token_seconds_count", "forebay_inter_token_latency_seconds_count",
        "forebay_generated_tokens_total", "forebay_requests_finished_total", "forebay_prompt_tokens_total",
    )  # fmt: skip

    def counts() -> list[float]:
        return [tiny_server.metric(name) for name in names]

    generate(tiny_server, max_tokens=2, ignore_eos=True)
    before, probes = counts(), tiny_server.metric("forebay_probe_seconds_count")
    for _ in range(3):
        assert tiny_server.get("/health_generate").status == 200
    assert counts() == before
    assert tiny_server.metric("forebay_probe_seconds_count") == probes + 3
    generate(tiny_server, max_tokens=2, ignore_eos=True)
    assert counts() == [before[0] + 1, before[1] + 1, before[2] + 2, before[3] + 1, before[4] + 3]
