"""The official client, unchanged, against the real server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_process import ServerProcess, ask

pytestmark = pytest.mark.engine

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="smollm2", messages=CAPITAL, **{"temperature": 0, **options})


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    for options in ({}, {"stop": ["ance", "zzz"]}, {"temperature": 0.9, "seed": 5, "n": 2}, {"logprobs": True}):
        whole = chat(client, max_tokens=24, **options)
        chunks = list(chat(client, max_tokens=24, stream=True, stream_options={"include_usage": True}, **options))
        texts, reasons = {}, {}
        tokens: list[str] = []
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
                tokens += [entry.token for entry in (choice.logprobs.content if choice.logprobs else [])]
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert all(chunk.usage is None for chunk in chunks[:-1])
        if "logprobs" in options:
            assert tokens == [entry.token for entry in whole.choices[0].logprobs.content]


def test_stop_strings_end_the_text_before_them_even_across_tokens(client: openai.OpenAI) -> None:
    full = chat(client, max_tokens=24).choices[0].message.content
    stop = full[7:19]
    cut = chat(client, max_tokens=24, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (full[:7], "stop")


def test_n_choices_differ_by_seed_and_repeat_with_it(client: openai.OpenAI) -> None:
    def texts(**options: Any) -> list[str]:
        made = client.completions.create(
            model="smollm2", prompt="Once upon a time", n=3, max_tokens=12, temperature=1.0, **options
        )
        return [choice.text for choice in made.choices]

    first = texts(seed=7)
    assert len(set(first)) == 3
    assert texts(seed=7) == first
    assert texts(seed=8)[:2] != first[:2]
    assert texts() != texts()


def test_prompts_as_text_ids_and_lists(client: openai.OpenAI, server: ServerProcess, smollm2: Any) -> None:
    from forebay.engine.api.text.tokenizer import ModelTokenizer

    codec = ModelTokenizer(smollm2)
    texts = ["The sky is", "Two plus two is"]
    ids = [codec.encode(text, add_special_tokens=True) for text in texts]
    common: dict[str, Any] = {"model": "smollm2", "max_tokens": 6, "temperature": 0}
    alone = [client.completions.create(prompt=text, **common).choices[0].text for text in texts]
    for prompt in (texts, ids):
        made = client.completions.create(prompt=prompt, **common)
        assert [choice.text for choice in made.choices] == alone
        assert made.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(prompt=ids[0], **common).choices[0].text == alone[0]
    echoed = client.completions.create(prompt=texts, echo=True, **common)
    assert [choice.text for choice in echoed.choices] == [t + a for t, a in zip(texts, alone, strict=True)]


def test_token_ids_come_back_when_asked_for(server: ServerProcess) -> None:
    whole = server.complete([5, 6, 7], max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == 8
    again = server.complete([5, 6, 7, *ids[:4]], max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True)
    assert again["choices"][0]["token_ids"] == ids[4:]
    body = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    events = server.post("/v1/completions", {**body, "stream": True, "return_token_ids": True}).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids


def test_lengths(client: openai.OpenAI) -> None:
    def make(**options: Any) -> Any:
        extra = {key: options.pop(key) for key in ("ignore_eos", "min_tokens") if key in options}
        return chat(client, extra_body=extra, **options)

    assert make(max_tokens=3).choices[0].finish_reason == "length"
    assert make(max_completion_tokens=5).usage.completion_tokens == 5
    natural = make(max_tokens=64).usage.completion_tokens
    assert natural < 40
    assert make(max_tokens=40, ignore_eos=True).usage.completion_tokens == 40
    assert make(max_tokens=64, min_tokens=natural + 5).usage.completion_tokens > natural + 4
    default = client.completions.create(model="smollm2", prompt="1 2 3", extra_body={"ignore_eos": True})
    assert default.usage.completion_tokens == 16


def test_sampling_limits_make_it_greedy(client: openai.OpenAI) -> None:
    def text(**extra: Any) -> str:
        made = client.completions.create(
            model="smollm2",
            prompt="My favourite colour",
            max_tokens=8,
            temperature=extra.pop("temperature", 1.5),
            seed=3,
            extra_body=extra,
        )
        return str(made.choices[0].text)

    greedy = text(temperature=0)
    assert text(top_k=1) == greedy
    assert text(top_p=1e-6) == greedy
    assert text(min_p=1.0) == greedy
    assert text() != greedy


def test_penalties_stop_repetition(client: openai.OpenAI) -> None:
    prompt = "la la la la la la la la"

    def distinct(**options: Any) -> int:
        made = client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=24, temperature=0, logprobs=0, **options
        )
        return len(set(made.choices[0].logprobs.tokens))

    plain = distinct()
    assert distinct(frequency_penalty=2.0) > plain
    assert distinct(presence_penalty=2.0) > plain
    assert distinct(extra_body={"repetition_penalty": 1.8}) > plain


def test_logprobs(client: openai.OpenAI) -> None:
    made = chat(client, max_tokens=6, logprobs=True, top_logprobs=3).choices[0]
    entries = made.logprobs.content
    assert "".join(entry.token for entry in entries) == made.message.content
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert entry.logprob == best[0] <= 0
        assert bytes(entry.bytes).decode() == entry.token
    old = client.completions.create(model="smollm2", prompt="One two", max_tokens=4, temperature=0, logprobs=2)
    logprobs = old.choices[0].logprobs
    assert "".join(logprobs.tokens) == old.choices[0].text
    assert [len(top) for top in logprobs.top_logprobs] == [2] * len(logprobs.tokens)
    assert logprobs.text_offset[0] == 0


def test_cached_tokens_are_told_by_tier(client: openai.OpenAI, server: ServerProcess) -> None:
    prompt = "A sentence that nobody else asks in these tests, long enough for a few pages of the cache. " * 3

    def cached() -> dict[str, int]:
        made = client.completions.create(model="smollm2", prompt=prompt, max_tokens=1, temperature=0)
        details = made.usage.prompt_tokens_details
        by_tier = dict(details.cached_tokens_details)
        assert sum(by_tier.values()) == details.cached_tokens
        return by_tier

    assert cached() == {"device": 0, "host": 0, "disk": 0}
    on_device = cached()
    assert on_device["device"] > 32
    assert on_device["host"] == 0
    flushed = server.post("/flush_cache?tier=device").json()
    assert flushed["dropped_pages"]["device"] > 0
    assert cached() == {"device": 0, "host": on_device["device"], "disk": 0}


@pytest.mark.parametrize(
    ("change", "status", "names"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias"),
        ({"no_such_thing": 1}, 400, "no_such_thing"),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": 5}, 400, "stop"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"messages": []}, 400, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "image_url",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        ({"model": "gpt-4o"}, 404, "gpt-4o"),
    ],
)
def test_what_cannot_be_served_is_named(server: ServerProcess, change: dict[str, Any], status: int, names: str) -> None:
    answer = server.post("/v1/chat/completions", {"model": "smollm2", "messages": CAPITAL, **change})
    assert answer.status == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert names in error["message"]


def test_neutral_values_of_unimplemented_parameters_are_fine(client: openai.OpenAI) -> None:
    assert chat(
        client, max_tokens=2, tools=[], logit_bias={}, response_format={"type": "text"}, user="me", tool_choice="none"
    ).choices


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context length") as caught:
        client.completions.create(model="smollm2", prompt=[5] * 3000, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    message = str(caught.value)
    assert "3005" in message
    assert "3000" in message


def test_bad_bodies_and_paths_get_openai_errors(server: ServerProcess) -> None:
    for answer, status in (
        (server.post("/v1/completions", b"{nonsense"), 400),
        (server.post("/v1/completions", b"[]"), 400),
        (server.get("/v1/completions"), 405),
        (server.get("/nowhere"), 404),
        (server.post("/flush_cache?tier=tape"), 400),
    ):
        assert answer.status == status
        assert "Traceback" not in answer.text
        assert answer.json()["error"]["message"]


def test_the_operator_endpoints(server: ServerProcess) -> None:
    health = server.get("/health")
    assert (health.status, health.json()["status"]) == (200, "ok")
    assert server.get("/health_generate").json()["tokens"] == 1
    info = server.get("/server_info").json()
    assert info["asked"]["cache"]["device_bytes"] == 64_000_000
    pools = info["effective"]["pools"]
    assert pools["device_pool_bytes_total"] == pools["device_pool_bytes_per_rank"] <= 64_000_000
    assert (
        pools["device_pool_bytes_total"]
        == pools["device_pool_tokens"] * info["effective"]["kv_bytes_per_token"]["per_rank"]
    )
    assert 90_000_000 < pools["host_pool_bytes_total"] <= 100_000_000
    assert "text/html" in ask(server.url + "/").headers["content-type"]
    cache = server.get("/cache").json()
    assert "tiers" in cache
    assert all(isinstance(prefix["tokens"], int) for prefix in cache["hottest_prefixes"])
    assert json.loads(server.get("/status").text)["phase"] == "ready"
    before = server.metric("forebay_generated_tokens_total")
    server.complete("Count", max_tokens=4, ignore_eos=True)
    assert server.metric("forebay_generated_tokens_total") == before + 4
    for name in ("forebay_time_to_first_token_seconds_count", "forebay_inter_token_latency_seconds_count"):
        assert server.metric(name) > 0
    assert server.metric("forebay_tier_tokens", tier="device", state="capacity") == pools["device_pool_tokens"]
