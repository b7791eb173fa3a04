"""The two OpenAI request bodies, read and checked: text becomes token ids, choices become sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.engine.api.errors import ApiError, not_implemented
from forebay.engine.api.openai.sampling_params import Choices, Fields, is_token, read_choices, read_logprobs_count
from forebay.engine.api.text.chat_template import ChatTemplate, TemplateRefusedError
from forebay.engine.api.text.tokenizer import ModelTokenizer

__all__ = ["GenerationRequest", "ModelLimits", "Prompt", "read_chat", "read_completion"]

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions; chat has none: it may use the rest of the context."""
_MOST_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    names: tuple[str, ...]
    context_length: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text to be encoded (``tokens`` is None) or token ids."""

    text: str | None
    tokens: list[int] | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request of either endpoint."""

    prompts: list[Prompt]
    choices: Choices
    echo: bool = False
    is_chat: bool = False

    def encode(self, codec: ModelTokenizer) -> list[list[int]]:
        """Token ids of every prompt. Slow for long texts: runs off the event loop."""
        return [
            p.tokens if p.tokens is not None else codec.encode(p.text or "", add_special_tokens=p.add_special_tokens)
            for p in self.prompts
        ]

    def max_tokens(self, prompt: list[int], limits: ModelLimits) -> int:
        """Tokens to generate for ``prompt``.

        Raises:
            ApiError: it is empty, or does not fit the context together with what it asks for.
        """
        if not prompt:
            raise ApiError("The prompt is empty.", param="messages" if self.is_chat else "prompt")
        room = limits.context_length - len(prompt)
        wanted = self.choices.max_tokens
        if wanted is None:
            wanted = max(room, 1) if self.is_chat else min(_DEFAULT_COMPLETION_TOKENS, max(room, 1))
        if wanted > room:
            raise ApiError(
                f"This model's context length is {limits.context_length} tokens, but the request needs "
                f"{len(prompt) + wanted}: {len(prompt)} in the prompt and {wanted} to generate.",
                param="messages" if self.is_chat else "prompt",
                code="context_length_exceeded",
            )
        if self.choices.sampling.min_tokens > wanted:
            raise ApiError(
                f"'min_tokens' ({self.choices.sampling.min_tokens}) is above the tokens to generate ({wanted}).",
                param="min_tokens",
            )
        return wanted


def read_completion(data: Any, limits: ModelLimits) -> GenerationRequest:
    """A body of /v1/completions.

    Raises:
        ApiError: a field is missing, unknown, out of range or not implemented; it is named.
    """
    fields = Fields(data)
    _check_model(fields, limits)
    logprobs = read_logprobs_count(fields, "logprobs")
    max_tokens = fields.integer("max_tokens", None, 1, 2**31 - 1)
    echo = fields.flag("echo")
    prompts = _prompts(fields.take("prompt"), limits.vocab_size)
    choices = read_choices(fields, logprobs=logprobs, max_tokens=max_tokens, vocab_size=limits.vocab_size)
    best_of = fields.integer("best_of", choices.n, 1, 128)
    fields.check_all_read()
    if best_of != choices.n:
        raise not_implemented("best_of", "only as many as 'n'")
    if echo and logprobs is not None:
        raise not_implemented("echo", "together with 'logprobs', which are not computed for the prompt")
    return GenerationRequest(prompts, choices, echo=echo)


def read_chat(data: Any, limits: ModelLimits, template: ChatTemplate | None) -> GenerationRequest:
    """A body of /v1/chat/completions, rendered through the model's template.

    Raises:
        ApiError: as for ``read_completion``; also where the model has no template, or the template refuses the
            messages.
    """
    fields = Fields(data)
    _check_model(fields, limits)
    wants_logprobs = fields.flag("logprobs")
    top = read_logprobs_count(fields, "top_logprobs")
    if top is not None and not wants_logprobs:
        raise ApiError("'top_logprobs' goes with 'logprobs': true.", param="top_logprobs")
    old_name = fields.integer("max_tokens", None, 1, 2**31 - 1)
    max_tokens = fields.integer("max_completion_tokens", old_name, 1, 2**31 - 1)
    messages = _messages(fields.take("messages"))
    extra = fields.take("chat_template_kwargs", {})
    if not isinstance(extra, dict):
        raise ApiError("'chat_template_kwargs' must be an object.", param="chat_template_kwargs")
    choices = read_choices(
        fields, logprobs=(top or 0) if wants_logprobs else None, max_tokens=max_tokens, vocab_size=limits.vocab_size
    )
    fields.check_all_read()
    if template is None:
        raise ApiError("This model has no chat template; use /v1/completions.", code="no_chat_template")
    try:
        text = template.render(messages, extra)
    except TemplateRefusedError as error:
        raise ApiError(f"The model's chat template refused the messages: {error}", param="messages") from error
    return GenerationRequest([Prompt(text, add_special_tokens=False)], choices, is_chat=True)


def _check_model(fields: Fields, limits: ModelLimits) -> None:
    model = fields.take("model")
    if not isinstance(model, str):
        raise ApiError("'model' is missing; /v1/models lists what is served.", param="model")
    if model not in limits.names:
        raise ApiError(
            f"The model {model!r} does not exist here; this server has {limits.names[0]!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _prompts(value: Any, vocab_size: int) -> list[Prompt]:
    """Text, token ids, or a list of either."""
    if isinstance(value, str):
        return [Prompt(value)]
    if isinstance(value, list) and value:
        if all(is_token(item, vocab_size) for item in value):
            return [Prompt(None, value)]
        if len(value) <= _MOST_PROMPTS and all(isinstance(item, str) for item in value):
            return [Prompt(item) for item in value]
        if len(value) <= _MOST_PROMPTS and all(
            isinstance(item, list) and item and all(is_token(token, vocab_size) for token in item) for item in value
        ):
            return [Prompt(None, item) for item in value]
    raise ApiError(
        f"'prompt' must be a text, a list of token ids below {vocab_size}, or a list of up to {_MOST_PROMPTS} of "
        "either.",
        param="prompt",
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ApiError("'messages' must be a list of at least one message.", param="messages")
    return [_message(entry, f"messages[{index}]") for index, entry in enumerate(value)]


def _message(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise ApiError(f"'{where}' must be an object with a 'role'.", param=where)
    for name, value in entry.items():
        if name in ("role", "content", "name") or value is None or value == []:
            continue
        if name in ("tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning_content"):
            raise not_implemented(f"{where}.{name}")
        raise ApiError(f"Unknown field: '{where}.{name}'.", param=f"{where}.{name}", code="unknown_parameter")
    if entry["role"] in ("tool", "function"):
        raise not_implemented(f"{where}.role", "tools are not supported")
    message = {"role": entry["role"], "content": _content(entry.get("content"), f"{where}.content")}
    if isinstance(entry.get("name"), str):
        message["name"] = entry["name"]
    return message


def _content(value: Any, where: str) -> str:
    """A text, or text parts that are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(f"'{where}' must be a text or a list of text parts.", param=where)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise not_implemented(f"{where}[{index}].type", f"{kind!r} parts; only text")
        if not isinstance(part.get("text"), str):
            raise ApiError(f"'{where}[{index}].text' must be a text.", param=f"{where}[{index}].text")
        texts.append(part["text"])
    return "".join(texts)
