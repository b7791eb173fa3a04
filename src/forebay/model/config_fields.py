"""Typed reading of a config.json: every miss is one line that names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.errors import UsageError

__all__ = ["ConfigFields"]


class ConfigFields:
    """One JSON object of a model's configuration.

    Args:
        values: the object.
        where: its file, and the path inside it (``config.json``, ``config.json: text_config``).
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def child(self, name: str) -> ConfigFields:
        """The object under ``name``."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise UsageError(f"{self.where}: field {name!r} is {_kind(value)}, an object is needed")
        return ConfigFields(value, f"{self.where}: {name}")

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of ``names`` that is there, a whole number of at least ``least``.

        Raises:
            UsageError: none is there and there is no default, or it is no such number.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{self.where}: field {name!r} is {value!r}, a whole number >= {least} is needed")
            return value
        if default is None:
            raise UsageError(
                f"{self.where}: field {names[0]!r} is missing",
                fix="add it to the file, or point to a complete checkpoint folder",
            )
        return default

    def optional_integer(self, *names: str, least: int = 1) -> int | None:
        """As ``integer``, with None where none of ``names`` is there."""
        if not any(name in self for name in names):
            return None
        return self.integer(*names, least=least)

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise UsageError(f"{self.where}: field {name!r} is {_kind(value)}, a text is needed")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: field {name!r} is {value!r}, true or false is needed")
        return value

    def texts(self, name: str, length: int | None = None) -> list[str]:
        """A list of strings, of ``length`` where that is given."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.where}: field {name!r} is {_kind(value)}, a list of texts is needed")
        if length is not None and len(value) < length:
            raise UsageError(f"{self.where}: field {name!r} has {len(value)} entries for {length} layers")
        return value if length is None else value[:length]

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers; empty where it is missing."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise UsageError(f"{self.where}: field {name!r} is {_kind(value)}, a list of whole numbers is needed")
        return value


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
