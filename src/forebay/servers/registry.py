"""Find the ``Server`` of a name, a command line or an answer."""

from __future__ import annotations

from forebay.errors import UsageError
from forebay.servers.base import Server
from forebay.servers.embedded_server import Embedded
from forebay.servers.http_client import ServerAnswer
from forebay.servers.openai_api import listed_models
from forebay.servers.sglang_server import SGLang
from forebay.servers.unknown_server import UnknownServer
from forebay.servers.vllm_server import VLLM

__all__ = ["SERVERS", "server_named", "server_of_command", "server_of_models", "server_of_owner"]

_ALL: tuple[Server, ...] = (Embedded(), SGLang(), VLLM())
SERVERS: dict[str, Server] = {server.name: server for server in _ALL}

# server -> parts of its command lines and process titles
_COMMAND_MARKS = (
    ("sglang", ("sglang.launch_server", "sglang::", "sglang serve", "cpu/launch.py")),
    ("vllm", ("vllm.entrypoints", "VLLM::", "vllm serve")),
    ("embedded", ("forebay serve", "forebay.cli", "forebay::", "forebay.engine")),
)
_OWNERS = {"sglang": "sglang", "vllm": "vllm", "forebay": "embedded"}


def server_named(name: str) -> Server:
    """The server called ``name``; ``unknown`` is one that only has the OpenAI API.

    Raises:
        UsageError: no such server.
    """
    if name == "unknown":
        return UnknownServer()
    if name not in SERVERS:
        raise UsageError(f"--server {name!r} is not known", fix=f"use one of {', '.join(SERVERS)}")
    return SERVERS[name]


def server_of_command(command: str) -> str | None:
    """The name of the server that a command line or process title belongs to, or None."""
    for name, marks in _COMMAND_MARKS:
        if any(mark in command for mark in marks):
            return name
    return None


def server_of_models(answer: ServerAnswer) -> str | None:
    """The name of the server that sent an answer of /v1/models, by its ``owned_by``; None for other servers."""
    models = listed_models(answer)
    return server_of_owner(str(models[0].get("owned_by"))) if models else None


def server_of_owner(owned_by: str) -> str | None:
    """The name of the server that writes ``owned_by`` into its model list, or None."""
    return next((name for owner, name in _OWNERS.items() if owner in owned_by.lower()), None)
