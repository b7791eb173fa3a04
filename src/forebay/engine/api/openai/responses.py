"""The shapes of OpenAI's answers: whole and as stream chunks, for completions and for chat."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from forebay.engine.api.generation import Delta, TokenLogprob, TokenUsage
from forebay.engine.api.text.tokenizer import ModelTokenizer

__all__ = ["AnswerFormat", "ChatFormat", "CompletionFormat", "usage_json"]


class AnswerFormat:
    """One request's answer.

    Args:
        model: the name the client used.
        codec: spells tokens for log-probabilities.
        wants_logprobs: whether choices carry log-probabilities.
        wants_tokens: whether choices carry ``token_ids`` (vLLM's ``return_token_ids``).
    """

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str, codec: ModelTokenizer, *, wants_logprobs: bool, wants_tokens: bool) -> None:
        self.wants_tokens = wants_tokens
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._codec = codec
        self._wants_logprobs = wants_logprobs

    def whole(self, deltas: Sequence[Delta], usage: TokenUsage) -> dict[str, Any]:
        """The answer of a request without streaming."""
        choices = [{**self._choice(delta), **self._token_ids(delta)} for delta in deltas]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage_json(usage)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that comes before a choice's first text, if the format has one."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One piece of a stream."""
        choice = {**self._chunk_choice(delta), **self._token_ids(delta)}
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def usage_chunk(self, usage: TokenUsage) -> dict[str, Any]:
        """The last chunk where usage was asked for."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage_json(usage)}

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.tokens} if self.wants_tokens else {}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


class CompletionFormat(AnswerFormat):
    """/v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, codec: ModelTokenizer, *, wants_logprobs: bool, wants_tokens: bool) -> None:
        super().__init__(model, codec, wants_logprobs=wants_logprobs, wants_tokens=wants_tokens)
        self._offsets: dict[int, int] = {}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta) if self._wants_logprobs else None,
            "finish_reason": delta.finish,
        }

    _chunk_choice = _choice

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        offset = self._offsets.get(delta.index, 0)
        tokens, offsets = [], []
        for entry in delta.logprobs:
            text = self._text(entry.token)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
        self._offsets[delta.index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": [{self._text(t): p for t, p in entry.top} for entry in delta.logprobs],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._codec.token_bytes(token).decode("utf-8", "replace")


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": self.chunk_object, "choices": [first]}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish,
        }

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or delta.finish is None else {},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._entry(entry) for entry in delta.logprobs], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._codec.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def usage_json(usage: TokenUsage) -> dict[str, Any]:
    """Token counts, with the prompt's cached tokens in total and by tier."""
    device, host, disk = usage.cached
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": device + host + disk,
            "cached_tokens_details": {"device": device, "host": host, "disk": disk},
        },
    }
