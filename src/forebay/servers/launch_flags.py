"""Command lines of the servers: the flags of a planned command, flags all servers share, CPU binding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from forebay.errors import UsageError
from forebay.servers.argv_flags import flag_value, has_flag
from forebay.servers.base import Launch, StartRequest

__all__ = ["api_key_of", "common_flags", "cpu_bind", "environment_path", "flags_of", "hide_api_key", "positive_flag"]


def flags_of(argv: Sequence[str]) -> tuple[str, ...]:
    """A command's own flags: ``argv`` from its first ``--`` word on (interpreter, module and verbs are the head)."""
    for index, word in enumerate(argv):
        if word.startswith("--"):
            return tuple(argv[index:])
    return ()


def common_flags(request: StartRequest) -> list[str]:
    """The flags that all three servers spell alike, without those the user gives."""
    flags: list[str] = []
    for name, value in (
        ("--host", request.host),
        ("--port", str(request.port)),
        ("--served-model-name", request.served_name),
    ):
        if value is not None and not has_flag(request.extra, name):
            flags += [name, value]
    return flags


def environment_path(first: str, variable: str = "PYTHONPATH") -> str:
    """The value of ``variable`` with ``first`` put before what it holds now."""
    rest = os.environ.get(variable)
    return f"{first}{os.pathsep}{rest}" if rest else first


def cpu_bind(ranks: int) -> str:
    """Cores for ``ranks`` CPU ranks as SGLang and vLLM read them: a range per rank,
    ``|`` between (``0-1`` or ``0|1``).
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= 1:
        return f"{cores[0]}-{cores[-1]}" if len(cores) == cores[-1] - cores[0] + 1 else ",".join(map(str, cores))
    share = max(1, len(cores) // ranks)
    groups = [cores[(rank * share) % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def positive_flag(argv: Sequence[str], *names: str, default: int) -> int:
    """The value of a flag that takes a whole number from 1 on; ``default`` where it is not given.

    Raises:
        UsageError: it is no such number.
    """
    text = flag_value(argv, *names)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{names[0]} {text!r} is not a whole number from 1 on", fix=f"{names[0]} {default}")
    return int(text)


def api_key_of(argv: Sequence[str]) -> str:
    """The value of ``--api-key``; empty where it is not given."""
    return flag_value(argv, "--api-key") or ""


def hide_api_key(launch: Launch, variable: str, key: str = "") -> Launch:
    """``launch`` without ``--api-key`` in its command line, where every user of the host could read it.

    Args:
        variable: the variable from which the server reads the key; empty: a file for ``--config``.
        key: the key to use where the command line has none.
    """
    key = api_key_of(launch.argv) or key
    if not key or (not variable and has_flag(launch.argv, "--config")):
        return launch
    argv: list[str] = []
    skip = False
    for word in launch.argv:
        if not skip and word != "--api-key" and not word.startswith("--api-key="):
            argv.append(word)
        skip = word == "--api-key"
    if variable:
        return replace(launch, argv=tuple(argv), secret_env={**launch.secret_env, variable: key})
    return replace(launch, argv=tuple(argv), secret_config={**launch.secret_config, "api-key": key})
