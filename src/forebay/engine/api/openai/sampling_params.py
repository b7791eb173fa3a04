"""Reading a request's JSON: every field is known, of the right type and in range, or the answer names it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from forebay.engine.api.errors import ApiError, not_implemented
from forebay.engine.sampling_params import SamplingParams

__all__ = ["Choices", "Fields", "read_choices"]

_MOST_CHOICES = 128
_MOST_STOPS = 16
_MOST_LOGPROBS = 20
_SEED_LIMIT = 2**63

# Fields we know and do not implement -> the value that asks for nothing and is therefore accepted.
_UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
}
# Fields that change nothing in the answer.
_HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key")


class Fields:
    """One JSON object, read field by field; what nobody has read at the end is unknown.

    Args:
        data: the decoded JSON.

    Raises:
        ApiError: it is no object.
    """

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict):
            raise ApiError("The body must be a JSON object.")
        self._data = {key: value for key, value in data.items() if value is not None}
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The field as it is; null counts as absent."""
        self._read.add(name)
        return self._data.get(name, default)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number within [low, high]."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ApiError(f"{name!r} must be a number from {low:g} to {high:g}, not {_show(value)}.", param=name)
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number within [low, high]; ``default`` when absent."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ApiError(f"{name!r} must be a whole number from {low} to {high}, not {_show(value)}.", param=name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ApiError(f"{name!r} must be true or false, not {_show(value)}.", param=name)
        return value

    def check_all_read(self) -> None:
        """Refuse what is left: fields we do not implement by name, unknown ones as unknown."""
        for name in sorted(set(self._data) - self._read - set(_HARMLESS)):
            if name not in _UNIMPLEMENTED:
                raise ApiError(f"Unknown parameter: {name!r}.", param=name, code="unknown_parameter")
            if self._data[name] not in _UNIMPLEMENTED[name]:
                raise not_implemented(name)


@dataclass(frozen=True, slots=True)
class Choices:
    """How a request's choices are generated, whatever the endpoint."""

    n: int
    max_tokens: int | None
    sampling: SamplingParams
    """Complete but for ``max_tokens`` and the model's own end tokens."""
    ignore_eos: bool
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


def read_choices(fields: Fields, *, logprobs: int | None, max_tokens: int | None, vocab_size: int) -> Choices:
    """The sampling part of a request; ``logprobs`` and ``max_tokens`` are read by the endpoints, which differ there."""
    n = fields.integer("n", 1, 1, _MOST_CHOICES) or 1
    stream = fields.flag("stream")
    sampling = SamplingParams(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_top_p(fields),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_repetition_penalty(fields),
        seed=_seed(fields),
        logprobs=logprobs,
        min_tokens=fields.integer("min_tokens", 0, 0, 2**31 - 1) or 0,
        stop_token_ids=_stop_ids(fields, vocab_size),
    )
    return Choices(
        n=n,
        max_tokens=max_tokens,
        sampling=sampling,
        ignore_eos=fields.flag("ignore_eos"),
        stops=_stops(fields),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        return_token_ids=fields.flag("return_token_ids"),
    )


def read_logprobs_count(fields: Fields, name: str) -> int | None:
    """How many alternatives a token's log-probabilities shall list."""
    return fields.integer(name, None, 0, _MOST_LOGPROBS)


def _top_p(fields: Fields) -> float:
    value = fields.number("top_p", 1.0, 0.0, 1.0)
    if value == 0.0:
        raise ApiError("'top_p' must be above 0 (temperature 0 is greedy decoding).", param="top_p")
    return value


def _top_k(fields: Fields) -> int:
    """-1 and 0 both mean: all."""
    value = fields.integer("top_k", -1, -1, 2**31 - 1)
    return value if value else -1


def _repetition_penalty(fields: Fields) -> float:
    value = fields.number("repetition_penalty", 1.0, 0.0, 2.0)
    if value == 0.0:
        raise ApiError("'repetition_penalty' must be above 0; 1 is none.", param="repetition_penalty")
    return value


def _seed(fields: Fields) -> int:
    """The client's, or one we draw: a request always has one."""
    value = fields.integer("seed", None, -_SEED_LIMIT, _SEED_LIMIT - 1)
    return secrets.randbits(63) if value is None else value % _SEED_LIMIT


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"'stop' must be a string or up to {_MOST_STOPS} of them, none empty.", param="stop")
    return tuple(stops)


def _stop_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.take("stop_token_ids", [])
    if not isinstance(value, list) or len(value) > _MOST_STOPS or not all(is_token(t, vocab_size) for t in value):
        raise ApiError(
            f"'stop_token_ids' must be up to {_MOST_STOPS} token ids below {vocab_size}.", param="stop_token_ids"
        )
    return tuple(value)


def is_token(value: Any, vocab_size: int) -> bool:
    """True for a token id of the model."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _include_usage(fields: Fields, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise ApiError("'stream_options' goes with 'stream': true.", param="stream_options")
    options = Fields(value)
    include = options.flag("include_usage")
    options.flag("include_obfuscation")  # padding against traffic analysis: a proxy's business; absent is allowed
    options.check_all_read()
    return include


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
