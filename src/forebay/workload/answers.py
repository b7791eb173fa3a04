"""The answers of an OpenAI-compatible server as typed records; unknown fields are ignored, missing ones are None."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["TIERS", "CompletionAnswer", "ReportedUsage", "decode_answer", "decode_chunk"]

TIERS = ("device", "host", "disk")


class _CachedDetails(msgspec.Struct):
    device: int | None = None
    host: int | None = None
    disk: int | None = None
    storage: int | None = None  # SGLang's name for its third tier


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cached_tokens_details: _CachedDetails | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None  # inside a stream: an object with a message, or a text


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Tokens of one request. ``cached_tokens`` is None when the server does not say;
    ``by_tier`` sums to it when given.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """One finished answer; ``reasoning`` is None when the server does not separate it from the content."""

    content: str
    reasoning: str | None
    finish_reason: str | None
    usage: ReportedUsage | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream. ``text`` includes reasoning; an ``error`` ends the stream."""

    text: str
    finish_reason: str | None
    usage: ReportedUsage | None
    error: str | None = None


def decode_answer(body: bytes) -> CompletionAnswer:
    """Read a whole chat or completions body.

    Raises:
        ValueError: not JSON, of another shape, or without a choice.
    """
    decoded = _decode(body)
    if not decoded.choices:
        raise ValueError("no choices in the answer")
    choice = decoded.choices[0]
    if choice.message is None:
        if choice.text is None:
            raise ValueError("neither message nor text in the answer")
        return CompletionAnswer(choice.text, None, choice.finish_reason, _usage(decoded.usage))
    message = choice.message
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    return CompletionAnswer(message.content or "", reasoning, choice.finish_reason, _usage(decoded.usage))


def decode_chunk(body: bytes) -> Chunk:
    """Read one ``data:`` event of a stream.

    Raises:
        ValueError: not JSON, or of another shape.
    """
    decoded = _decode(body)
    if decoded.error:
        error = decoded.error
        return Chunk("", None, None, str(error.get("message") or error) if isinstance(error, dict) else str(error))
    if not decoded.choices:
        return Chunk("", None, _usage(decoded.usage))
    choice = decoded.choices[0]
    text = choice.text or ""
    if choice.delta is not None:
        delta = choice.delta
        text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
    return Chunk(text, choice.finish_reason, _usage(decoded.usage))


def _decode(body: bytes) -> _Body:
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def _usage(raw: _Usage | None) -> ReportedUsage | None:
    if raw is None:
        return None
    details = raw.prompt_tokens_details
    if details is None:
        return ReportedUsage(raw.prompt_tokens, raw.completion_tokens)
    by_tier: dict[str, int] = {}
    tiers = details.cached_tokens_details
    if tiers is not None:
        disk = tiers.disk if tiers.disk is not None else tiers.storage
        by_tier = {
            tier: count
            for tier, count in zip(TIERS, (tiers.device, tiers.host, disk), strict=True)
            if count is not None
        }
    return ReportedUsage(raw.prompt_tokens, raw.completion_tokens, details.cached_tokens, by_tier)
