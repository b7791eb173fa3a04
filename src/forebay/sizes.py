"""Sizes: bytes inside, a unit outside (GB = 10**9, GiB = 2**30)."""

from __future__ import annotations

import re

from forebay.errors import UsageError

__all__ = ["GB", "GIB", "format_binary", "format_size", "parse_size"]

GB = 10**9
GIB = 2**30

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": GB,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": GIB,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str, *, what: str = "size") -> int:
    """Read ``"48GB"`` or ``"1.5 GiB"`` into bytes.

    Args:
        text: a number with a unit: B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024).
        what: the option being read, for the message.

    Raises:
        UsageError: no unit (both readings are shown), an unknown unit, or no number.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a size", fix="write a number with a unit, such as 48GB or 48GiB")
    number, unit = float(match[1]), match[2]
    if not unit:
        raise UsageError(
            f"{what}: {text!r} has no unit: it could be {text.strip()}GB ({number * GB:,.0f} bytes) or "
            f"{text.strip()}GiB ({number * GIB:,.0f} bytes)",
            fix=f"write {text.strip()}GB or {text.strip()}GiB",
        )
    factor = _UNITS.get(unit.upper())
    if factor is None:
        known = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise UsageError(f"{what}: unknown unit {unit!r} in {text!r}", fix=f"use one of {known}")
    return round(number * factor)


def format_size(count: float) -> str:
    """Bytes as a decimal size: ``384 GB``, ``23.0 kB`` is written ``23 KB``."""
    return _format(count, 1000, ("B", "KB", "MB", "GB", "TB"))


def format_binary(count: float) -> str:
    """Bytes as a binary size: ``1.5 GiB``."""
    return _format(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _format(count: float, base: int, units: tuple[str, ...]) -> str:
    value, index = float(count), 0
    while abs(value) >= base and index < len(units) - 1:
        value, index = value / base, index + 1
    text = f"{value:,.0f}" if index == 0 or abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {units[index]}"
