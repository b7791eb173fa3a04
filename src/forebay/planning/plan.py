"""A plan: the answer to "will it fit", with every number's origin, as one frozen value.

The JSON form is stable: ``schema`` counts its incompatible changes, ``_bytes`` are bytes. ``docs/plan.md`` documents
each key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["SCHEMA", "DevicePlan", "HostPlan", "Plan", "Problem", "Provenance", "Quantity", "from_json"]

SCHEMA = 1


class Provenance(StrEnum):
    """Where a number comes from."""

    HEADER = "header"
    """Read from the checkpoint's headers."""
    CONFIG = "config"
    """Read from the model's configuration or the catalogue."""
    FORMULA = "formula"
    """Arithmetic on other numbers here."""
    RULE = "rule"
    """The server's own rule, by version."""
    MEASURED = "measured"
    """Read from the machine now (or from the machine's file)."""
    GIVEN = "given"
    """The user said so."""
    ASSUMED = "assumed"
    """A default of the planner: it may differ."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of the plan.

    Args:
        key: where it stands in the JSON (``device.kv_tokens``), or a name of its own for what is in between.
        label: for a person.
        value: the number; None where it cannot be known.
        unit: ``bytes``, ``tokens``, ``requests``, ``fraction``, ``ratio``, ``count``.
        note: the arithmetic or the source, in one line.
    """

    key: str
    label: str
    value: float | int | None
    unit: str
    how: Provenance
    note: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, under a code of ``forebay.causes.Cause``, and the nearest setting that works."""

    code: str
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One rank's device (the fullest). None where no device was given."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    static_fraction: float | None = None
    static_bytes: int | None = None
    weights_bytes: int | None = None
    state_bytes: int | None = None
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    distinct_tokens: int | None = None
    """Tokens all ranks' device pools hold together, each counted once."""
    reserve_bytes: int | None = None
    left_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The host tier."""

    available_bytes: int
    reserve_bytes: int
    per_rank_bytes: int
    """What was asked for, in the server's unit, with the pools the server adds beside it."""
    allocated_per_rank_bytes: int
    """The same to the byte, rounded to pages as the server rounds."""
    total_bytes: int
    per_rank_tokens: int
    copies: float
    """How many times the ranks of one replica store the same byte."""
    distinct_tokens: int
    distinct_bytes: int
    largest_safe_per_rank_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole answer. ``fits`` is True where ``problems`` is empty."""

    fits: bool
    server: str
    server_version: str
    model: str
    architecture: str
    ranks: int
    tp: int
    dp: int
    pp: int
    page_size: int
    context_length: int
    kv_bytes_per_token_per_rank: int
    kv_bytes_per_token: int
    kv_replicated: bool
    state_bytes_per_request_per_rank: int
    weights_bytes: int | None
    weights_per_rank_bytes: int | None
    full_length_requests: float | None
    device: DevicePlan
    host: HostPlan
    command: tuple[str, ...]
    env: Mapping[str, str]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    steps: tuple[Quantity, ...]
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """The documented JSON: nested objects, and ``how`` mapping each number's key to its origin."""
        data = asdict(self)
        data["how"] = {step.key: f"{step.how}: {step.note}" for step in self.steps}
        data["command"] = list(self.command)
        return data


def from_json(data: Mapping[str, Any]) -> Plan:
    """Read ``Plan.to_json`` back (for ``forebay up plan.json``).

    Raises:
        KeyError, TypeError: it is no plan; ValueError: another schema.
    """
    if data["schema"] != SCHEMA:
        raise ValueError(f"plan of schema {data['schema']}, this forebay reads {SCHEMA}")
    fields = {name: data[name] for name in Plan.__dataclass_fields__}
    return Plan(
        **{
            **fields,
            "device": DevicePlan(**data["device"]),
            "host": HostPlan(**data["host"]),
            "command": tuple(data["command"]),
            "problems": tuple(Problem(**item) for item in data["problems"]),
            "warnings": tuple(Problem(**item) for item in data["warnings"]),
            "steps": tuple(Quantity(**{**item, "how": Provenance(item["how"])}) for item in data["steps"]),
        }
    )
