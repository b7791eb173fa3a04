"""From a name, a command line or an answer to the ``Server`` it belongs to."""

from __future__ import annotations

from forebay.errors import UsageError
from forebay.servers.base import Server
from forebay.servers.embedded import Embedded
from forebay.servers.http_client import ServerAnswer
from forebay.servers.sglang import SGLang
from forebay.servers.unknown import UnknownServer
from forebay.servers.vllm import VLLM

__all__ = ["SERVERS", "server_named", "server_of_command", "server_of_models"]

_ALL: tuple[Server, ...] = (Embedded(), SGLang(), VLLM())
SERVERS: dict[str, Server] = {server.name: server for server in _ALL}

# words of a command line (titles overwrite it) -> server
_COMMAND_MARKS = (
    ("sglang", ("sglang.launch_server", "sglang::", "sglang serve", "cpu/launch.py")),
    ("vllm", ("vllm.entrypoints", "VLLM::", "vllm serve")),
    ("embedded", ("forebay serve", "forebay.cli", "forebay::", "forebay.engine")),
)
_OWNERS = {"sglang": "sglang", "vllm": "vllm", "forebay": "embedded"}


def server_named(name: str) -> Server:
    """The server called ``name``; ``unknown`` speaks plain OpenAI.

    Raises:
        UsageError: no such server.
    """
    if name == "unknown":
        return UnknownServer()
    if name not in SERVERS:
        raise UsageError(f"--server {name!r} is not known", fix=f"use one of {', '.join(SERVERS)}")
    return SERVERS[name]


def server_of_command(command: str) -> str | None:
    """Whose command line it is, or None."""
    for name, marks in _COMMAND_MARKS:
        if any(mark in command for mark in marks):
            return name
    return None


def server_of_models(answer: ServerAnswer) -> str | None:
    """Whose answer of /v1/models it is: ``owned_by`` says so in all three servers; None for others."""
    body = answer.json() if answer.ok else None
    data = body.get("data") if isinstance(body, dict) else None
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return _OWNERS.get(str(data[0].get("owned_by")))
    return None
