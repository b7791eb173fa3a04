"""Read flags out of an argv as argparse does: ``--flag value`` or ``--flag=value``; the last one counts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["flag_value", "has_flag", "with_flag"]


def has_flag(argv: Sequence[str], *names: str) -> bool:
    """Whether any spelling in ``names`` is given."""
    return any(word == name or word.startswith(name + "=") for word in argv for name in names)


def flag_value(argv: Sequence[str], *names: str) -> str | None:
    """The value of the last of ``names`` given, or None. A flag without a value reads as an empty string."""
    found: str | None = None
    for index, word in enumerate(argv):
        for name in names:
            if word.startswith(name + "="):
                found = word[len(name) + 1 :]
            elif word == name:
                following = argv[index + 1] if index + 1 < len(argv) else ""
                found = "" if following.startswith("--") else following
    return found


def with_flag(argv: Sequence[str], name: str, value: str | None = None, *spellings: str) -> tuple[str, ...]:
    """``argv`` with ``name`` added, unless it or another spelling is there already."""
    if has_flag(argv, name, *spellings):
        return tuple(argv)
    return (*argv, name) if value is None else (*argv, name, value)
