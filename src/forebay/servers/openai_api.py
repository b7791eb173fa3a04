"""The OpenAI API as all servers speak it: the request for one token, and what its answer says."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.machine.interface import HttpFailureKind
from forebay.servers.base import Condition, HealthReading, ProbeRequest, TokenReading
from forebay.servers.http_client import ServerAnswer

__all__ = ["completion_request", "first_model", "listed_models", "read_completion", "refused_or_silent"]


def listed_models(answer: ServerAnswer) -> list[Mapping[str, object]]:
    """The entries of an answer of /v1/models; empty where it has none."""
    body = answer.json() if answer.ok else None
    data = body.get("data") if isinstance(body, dict) else None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def first_model(answer: ServerAnswer) -> str | None:
    """The first name in an answer of /v1/models; None where it has none."""
    models = listed_models(answer)
    return str(models[0]["id"]) if models and isinstance(models[0].get("id"), str) else None


def completion_request(model: str | None, prompt: str, tokens: int) -> ProbeRequest:
    """``POST /v1/completions``, greedy, for ``tokens`` tokens."""
    body: dict[str, object] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    if model is not None:
        body["model"] = model
    return ProbeRequest("POST", "/v1/completions", body)


def read_completion(answer: ServerAnswer) -> TokenReading:
    """Read an answer of /v1/completions: whether it holds a token, and the cached tokens its usage reports."""
    if not answer.ok:
        return TokenReading(False, answer.describe("POST /v1/completions"))
    body = answer.json()
    usage = body.get("usage") if isinstance(body, dict) else None
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(usage, dict) or not isinstance(choices, list) or not choices:
        return TokenReading(False, "POST /v1/completions answered 200 without usage and choices")
    generated = usage.get("completion_tokens") or 0
    prompt = usage.get("prompt_tokens")
    return TokenReading(
        ok=generated >= 1,
        evidence=f"POST /v1/completions: 200, {generated} token in {answer.seconds:.2f} s",
        text=str(choices[0].get("text", "")),
        prompt_tokens=prompt if isinstance(prompt, int) else None,
        cached=_cached(usage.get("prompt_tokens_details")),
    )


def _cached(details: object) -> Mapping[str, int] | None:
    if not isinstance(details, dict) or not isinstance(details.get("cached_tokens"), int):
        return None
    tiers = details.get("cached_tokens_details")
    if isinstance(tiers, dict):
        return {tier: count for tier, count in tiers.items() if isinstance(count, int)}
    return {"any": details["cached_tokens"]}


def refused_or_silent(answer: ServerAnswer, path: str) -> HealthReading:
    """The health reading of a request that got no answer."""
    condition = Condition.SILENT if answer.failure is HttpFailureKind.TIMEOUT else Condition.REFUSED
    return HealthReading(condition, answer.describe(path))
