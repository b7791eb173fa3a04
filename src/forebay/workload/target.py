"""From an address or a run name to a URL, and what the server there serves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.runs.run_record import all_runs, find_run
from forebay.servers.registry import server_of_owner
from forebay.workload.client import Client
from forebay.workload.failures import RequestFailure

__all__ = ["ServerIdentity", "identify", "is_ready", "up_address"]

# Settings that change a server's answers, as SGLang, vLLM and the embedded server call them; looked for at any depth of
# its report
_ANSWER_SETTINGS = frozenset(
    {
        "model_path",
        "model",
        "revision",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "context_length",
        "max_model_len",
        "batch_invariant",
        "enable_deterministic_inference",
        "chat_template",
        "reasoning_parser",
        "lora_paths",
    }
)
_DEFAULT_PORT = 30000  # of ``forebay up``
_INFO_PATHS = ("/server_info", "/get_server_info")


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server says it is.

    Attributes:
        model: the model name for requests.
        kind: ``embedded``, ``sglang``, ``vllm`` or ``unknown``.
        settings: the settings that change its answers; empty when it does not report them.
    """

    model: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def resolve(name: str) -> str:
    """The base URL of an address (``http://HOST:PORT``, ``HOST:PORT``) or of a run of ``forebay up``.

    Raises:
        UsageError: neither an address nor a run.
    """
    if "://" in name:
        return name.rstrip("/").removesuffix("/v1")
    run = find_run(name)
    if run is not None:
        return run.read().url
    host, _, port = name.rpartition(":")
    if port.isdigit():
        return f"http://{host or '127.0.0.1'}:{port}"
    known = sorted(run.name for run in all_runs())
    runs = f"; runs here: {', '.join(known)}" if known else "; there are no runs here"
    raise UsageError(
        f"{name!r} is neither an address nor a run{runs}", fix="give http://HOST:PORT, or `forebay up` first"
    )


async def is_ready(client: Client, *, timeout_s: float = 5.0) -> bool:
    """Whether ``/health`` answers 2xx; a server without ``/health`` is ready when it lists its models."""
    try:
        status, _ = await client.get("/health", timeout_s=timeout_s)
        if status == 404:
            status, _ = await client.get("/v1/models", timeout_s=timeout_s)
    except RequestFailure:
        return False
    return 200 <= status < 300


async def identify(client: Client, *, model: str | None = None) -> ServerIdentity:
    """Ask a ready server what it serves.

    Args:
        model: the name to ask for; None takes the first model listed.

    Raises:
        RequestFailure: it does not answer.
        UsageError: it does not serve ``model``, or lists none.
    """
    _, raw = await client.get("/v1/models")
    listed = _listed(raw)
    names = [entry["id"] for entry in listed if isinstance(entry.get("id"), str)]
    if model is None and not names:
        raise UsageError(f"{client.url}/v1/models lists no model", fix="--model NAME")
    if model is not None and names and model not in names:
        raise UsageError(f"{client.url} serves {', '.join(names)}, not {model!r}", fix=f"--model {names[0]}")
    info = await _server_info(client)
    owner = str(listed[0].get("owned_by", "")) if listed else ""
    kind = "embedded" if "forebay_version" in info else server_of_owner(owner) or "unknown"
    settings: dict[str, Any] = {}
    _collect(info, settings)
    if listed and isinstance(listed[0].get("max_model_len"), int):
        settings.setdefault("max_model_len", listed[0]["max_model_len"])
    return ServerIdentity(model or names[0], kind, settings)


def _listed(raw: bytes) -> list[dict[str, Any]]:
    try:
        data = json.loads(raw).get("data")
    except (ValueError, AttributeError):
        return []
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


async def _server_info(client: Client) -> dict[str, Any]:
    for path in _INFO_PATHS:
        try:
            status, raw = await client.get(path)
            value = json.loads(raw) if status == 200 else None
        except (RequestFailure, ValueError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def _collect(value: Any, into: dict[str, Any]) -> None:
    """Add the answer settings in ``value`` to ``into``; the outermost mention of a name wins, and ``effective`` before
    ``asked``.
    """
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        plain = isinstance(inner, (str, int, float, bool))
        if name in _ANSWER_SETTINGS and plain:
            into.setdefault(name, inner)
    for name in sorted(value, key=lambda name: name != "effective"):
        _collect(value[name], into)


def up_address(what: str) -> str:
    """Where ``forebay up WHAT`` will serve: ``--port`` in it, else the saved plan's port, else the default of ``up``.

    Raises:
        UsageError: an unclosed quote, or a plan file that is not JSON.
    """
    words = split_command(what)
    for given in (words, _plan_command(words)):
        if "--port" in given[:-1]:
            return f"http://127.0.0.1:{given[given.index('--port') + 1]}"
    return f"http://127.0.0.1:{_DEFAULT_PORT}"


def split_command(what: str) -> list[str]:
    """The words of a command line, as a shell reads them.

    Raises:
        UsageError: an unclosed quote.
    """
    try:
        return shlex.split(what)
    except ValueError as error:
        raise UsageError(f"--up {what!r} is not a command line: {error}", fix="close the quotes") from None


def _plan_command(words: list[str]) -> list[str]:
    plan = Path(next((word for word in words if word.endswith(".json")), ""))
    if not plan.is_file():
        return []
    try:
        command = json.loads(plan.read_bytes())["command"]
    except (ValueError, KeyError, TypeError, OSError):
        raise UsageError(f"{plan} is not a plan file", fix=f"forebay plan MODEL --json > {plan}") from None
    return [str(word) for word in command] if isinstance(command, list) else []
