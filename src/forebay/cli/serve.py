"""``forebay serve``: becomes the engine's process, so that the pid the caller sees is the server's own."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from forebay.errors import UsageError

__all__ = ["command"]

_ENGINE_PACKAGES = ("torch", "starlette", "uvicorn", "uvloop", "zmq", "tokenizers", "prometheus_client", "jinja2")


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run the embedded inference server in the foreground (options: `forebay serve --help`)."""
    missing = [name for name in _ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the embedded server needs {', '.join(missing)}, not installed here",
            fix="pip install 'forebay[engine]'",
            code="dependency_missing",
        )
    argv = [sys.executable, "-m", "forebay.engine", *arguments]
    os.execv(sys.executable, argv)
