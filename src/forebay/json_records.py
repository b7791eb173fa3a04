"""Dataclasses to JSON and back, checked against their annotations, with the standard library alone.

Records are read and written on every host a server runs on, by whatever Python (3.10 or newer) is there: no package
can be counted on. Unknown keys are ignored, so a record of a newer minor version can still be read."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

__all__ = ["decode_record", "encode_record"]

_T = TypeVar("_T")


def encode_record(record: Any) -> bytes:
    """A dataclass as indented JSON."""
    return json.dumps(dataclasses.asdict(record), indent=1, ensure_ascii=False).encode()


def decode_record(kind: type[_T], fields: Any) -> _T:
    """Build ``kind`` from parsed JSON.

    Raises:
        ValueError: a field is missing or has another type; the message names it.
    """
    return typing.cast(_T, _value(kind, fields, kind.__name__))


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Literal and value in arguments:
        return value
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, value, where)
    if origin is list and isinstance(value, (list, tuple)):
        return [_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {
            _key(arguments[0], key, where): _value(arguments[1], item, f"{where}.{key}") for key, item in value.items()
        }
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _dataclass(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    expected = getattr(origin or kind, "__name__", str(kind))
    raise ValueError(f"{where}: expected {expected}, found {type(value).__name__}")


def _union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    failure: ValueError | None = None
    for kind in kinds:
        if kind is not type(None):
            try:
                return _value(kind, value, where)
            except ValueError as error:
                failure = error
    raise failure or ValueError(f"{where}: expected nothing")


def _key(kind: Any, key: str, where: str) -> Any:
    """JSON writes the keys of a mapping as text."""
    if kind is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"{where}: expected whole numbers as keys, found {key!r}") from None


def _dataclass(kind: type, fields: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    given = {}
    for field in dataclasses.fields(kind):
        if field.name in fields:
            given[field.name] = _value(hints[field.name], fields[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{field.name}: is missing")
    return kind(**given)
