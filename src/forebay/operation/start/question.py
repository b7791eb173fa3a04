"""One question to a server that is up, as a client would ask it: over /v1/chat/completions, greedily."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from forebay.machine.interface import Machine
from forebay.servers.http_client import Address, send

__all__ = ["ChatAnswer", "Question", "ask", "chat_body", "example_requests"]

_TIMEOUT_S = 300.0
_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Question:
    """A chat request to ``address``; ``model`` is the name the server gives its model."""

    address: Address
    model: str
    text: str


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer's text, or why there is none."""

    text: str | None
    failure: str | None = None


def chat_body(model: str, text: str) -> dict[str, object]:
    """The JSON body of a greedy chat request."""
    message = {"role": "user", "content": text}
    return {"model": model, "messages": [message], "temperature": 0, "max_tokens": _TOKENS}


def ask(machine: Machine, question: Question) -> ChatAnswer:
    """Send the question and wait for the whole answer."""
    path = "/v1/chat/completions"
    answer = send(
        machine, question.address, "POST", path, chat_body(question.model, question.text), timeout_s=_TIMEOUT_S
    )
    text = _content(answer.json()) if answer.ok else None
    if text is not None:
        return ChatAnswer(text)
    said = answer.text.strip().replace("\n", " ")[:200]
    return ChatAnswer(None, f"POST {answer.describe(path)}{f': {said}' if said else ''}")


def example_requests(url: str, model: str, text: str, flush_path: str | None) -> list[str]:
    """Commands for a person to try, complete as they stand. ``url`` is without ``/v1``."""
    body = json.dumps(chat_body(model, text), ensure_ascii=False)
    curl = f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    lines = ["Ask it yourself:", f"  {curl}"]
    if flush_path is not None:
        lines += [
            "See the lower tier at work: drop the device copies, ask again, and read usage...cached_tokens_details:",
            f"  curl -s -X POST '{url}{flush_path}' && {curl}",
        ]
    return [*lines, f"Any OpenAI client works with base_url={url}/v1 and model={model}."]


def _content(body: Any) -> str | None:
    try:
        text = body["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return text.strip() if isinstance(text, str) and text.strip() else None
