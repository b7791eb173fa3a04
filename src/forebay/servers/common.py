"""What the three servers share: heads of commands, OpenAI answers, processes that Python starts by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from forebay.machine.interface import HttpFailureKind
from forebay.servers.base import (
    Condition,
    HealthReading,
    ProbeRequest,
    ProcessView,
    Role,
    Setting,
    StartRequest,
    TokenReading,
)
from forebay.servers.flags import has_flag
from forebay.servers.http_client import ServerAnswer

__all__ = [
    "common_flags",
    "completion_request",
    "cpu_bind",
    "environment_path",
    "first_model",
    "flags_of",
    "read_completion",
    "refused_or_silent",
    "setting",
    "tree_roles",
]


def flags_of(argv: Sequence[str]) -> tuple[str, ...]:
    """A command's own flags: ``argv`` from its first ``--`` word on (interpreter, module and verbs are the head)."""
    for index, word in enumerate(argv):
        if word.startswith("--"):
            return tuple(argv[index:])
    return ()


def common_flags(request: StartRequest) -> list[str]:
    """What all three servers spell alike; a flag the user gives is left to the user."""
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
    """``first`` in front of what ``variable`` has."""
    rest = os.environ.get(variable)
    return f"{first}{os.pathsep}{rest}" if rest else first


def cpu_bind(ranks: int) -> str:
    """Cores for ``ranks`` CPU ranks in the form both servers read: ranges, ``|`` between ranks (``0-1`` or ``0|1``)."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= 1:
        return f"{cores[0]}-{cores[-1]}" if len(cores) == cores[-1] - cores[0] + 1 else ",".join(map(str, cores))
    share = max(1, len(cores) // ranks)
    groups = [cores[(rank * share) % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def first_model(answer: ServerAnswer) -> str | None:
    """The first name in an answer of /v1/models; None where it has none."""
    body = answer.json() if answer.ok else None
    data = body.get("data") if isinstance(body, dict) else None
    if isinstance(data, list) and data and isinstance(data[0], dict) and isinstance(data[0].get("id"), str):
        return str(data[0]["id"])
    return None


def completion_request(model: str | None, prompt: str, tokens: int) -> ProbeRequest:
    """``POST /v1/completions``, greedy."""
    body: dict[str, object] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    if model is not None:
        body["model"] = model
    return ProbeRequest("POST", "/v1/completions", body)


def read_completion(answer: ServerAnswer) -> TokenReading:
    """An OpenAI completion: at least one completion token, with what usage says of the cache."""
    if not answer.ok:
        return TokenReading(False, answer.describe("POST /v1/completions"))
    body = answer.json()
    usage = body.get("usage") if isinstance(body, dict) else None
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(usage, dict) or not isinstance(choices, list) or not choices:
        return TokenReading(False, "POST /v1/completions answered 200 without usage and choices")
    generated = usage.get("completion_tokens") or 0
    prompt = usage.get("prompt_tokens")
    return TokenReading(
        ok=generated >= 1,
        evidence=f"POST /v1/completions: 200, {generated} token in {answer.seconds:.2f} s",
        text=str(choices[0].get("text", "")),
        prompt_tokens=prompt if isinstance(prompt, int) else None,
        cached=_cached(usage.get("prompt_tokens_details")),
    )


def _cached(details: object) -> Mapping[str, int] | None:
    if not isinstance(details, dict) or not isinstance(details.get("cached_tokens"), int):
        return None
    tiers = details.get("cached_tokens_details")
    if isinstance(tiers, dict):
        return {tier: count for tier, count in tiers.items() if isinstance(count, int)}
    return {"any": details["cached_tokens"]}


def refused_or_silent(answer: ServerAnswer, path: str) -> HealthReading:
    """The reading of an answer without a status."""
    condition = Condition.SILENT if answer.failure is HttpFailureKind.TIMEOUT else Condition.REFUSED
    return HealthReading(condition, answer.describe(path))


def tree_roles(
    processes: Sequence[ProcessView], api_server: int, titles: Mapping[str, Role], *, every_python: Role | None = None
) -> dict[int, Role]:
    """Roles by process title, and by parentage where no title is set yet.

    Args:
        processes: the tree, orphans included.
        api_server: pid of the process that was launched.
        titles: words of a title -> its role; titles overwrite argv, so model and port are gone from it.
        every_python: the role of a multiprocessing child that has no title (yet).
    """
    roles: dict[int, Role] = {}
    for process in processes:
        words = process.command.strip()
        if process.pid == api_server:
            roles[process.pid] = Role.API_SERVER
        elif "resource_tracker" in words:
            roles[process.pid] = Role.TRACKER
        elif (titled := next((role for title, role in titles.items() if title in words), None)) is not None:
            roles[process.pid] = titled
        elif every_python is not None and "multiprocessing.spawn" in words:
            roles[process.pid] = every_python
        else:
            roles[process.pid] = Role.HELPER
    return roles


def setting(name: str, asked: str | None, effective: object, evidence: str, missing_flag: str | None = None) -> Setting:
    """A ``Setting`` with ``effective`` as text; None and an empty string are not known."""
    text = None if effective is None or effective == "" else str(effective)
    return Setting(name, asked, text, evidence, missing_flag)
