"""Chat messages to one prompt text, as transformers' ``apply_chat_template`` renders it.

Templates come with checkpoints, so they are untrusted: they run in jinja2's immutable sandbox. Environment, filters and
globals are those the format expects (Hugging Face documentation, "Chat templates"): trimmed blocks, loop controls,
``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, and the ``generation`` block, which only marks
text for training.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplate", "TemplateRefusedError"]


class TemplateRefusedError(Exception):
    """The template does not take these messages, in its own words."""


class ChatTemplate:
    """One model's template with its special tokens.

    Args:
        source: the jinja2 text.
        special_tokens: ``bos_token``, ``eos_token``... as the template's variables.

    Raises:
        jinja2.TemplateSyntaxError: the checkpoint's template is broken.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template: ``chat_template.jinja``,
        else ``chat_template`` in ``tokenizer_config.json`` (the one named ``default`` of a list); None when there is
        none.
        """
        settings = _read_json(folder / "tokenizer_config.json")
        source: Any = settings.get("chat_template")
        file = folder / "chat_template.jinja"
        if file.exists():
            source = file.read_text(encoding="utf-8")
        if isinstance(source, list):
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        return cls(source, special_tokens(settings)) if isinstance(source, str) else None

    def render(self, messages: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> str:
        """The prompt for the assistant's next turn.

        Args:
            messages: ``{"role", "content"}`` records.
            extra: further variables of the template (``chat_template_kwargs``).

        Raises:
            TemplateRefusedError: the template rejects the messages or fails on them.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(**{**variables, **(extra or {}), "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
            raise TemplateRefusedError(str(error)) from error


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like of a ``tokenizer_config.json``, whether written as text or as an added token."""
    found = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
