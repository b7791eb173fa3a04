"""What a run is tied to. Rows of one data set come from one model, one way of asking and one standard of acceptance."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import RefusedError
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.target import ServerIdentity

__all__ = ["check_asked", "check_fingerprint", "fingerprint_of", "write_atomically"]


def fingerprint_of(settings: GenerateSettings, server: ServerIdentity) -> dict[str, Any]:
    """Everything that shapes an answer or decides its fate. Addresses, concurrency and retries do not."""
    sampling, gates = settings.sampling, settings.gates
    return {
        "model": server.model,
        "server": {"kind": server.kind, **server.settings},
        "sampling": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            **sampling.extra,
        },
        "gates": {
            **{gate.value: action.value for gate, action in gates.actions.items()},
            "retries": gates.retries,
            "tags": [gates.open_tag, gates.close_tag],
        },
    }


def check_fingerprint(path: Path, now: Mapping[str, Any], *, allow_change: bool) -> list[str]:
    """Compare with the stored fingerprint, storing ``now`` when there is none or when a change is allowed.

    Returns:
        What changed, one text a field; empty when nothing did. Every accepted change stays listed in the file.

    Raises:
        RefusedError: something changed and that was not asked for.
    """
    if not path.exists():
        write_atomically(path, json.dumps({"schema": 1, "fingerprint": now, "changes": []}, indent=1).encode())
        return []
    stored = json.loads(path.read_text(encoding="utf-8"))
    changes = _differences(stored["fingerprint"], json.loads(json.dumps(now)))
    if not changes:
        return []
    if not allow_change:
        raise RefusedError(
            f"this run was begun otherwise: {'; '.join(changes)} (recorded in {path})",
            fix="continue with the old settings, write to another output, or add --allow-change to mix both in one data set",
        )
    record = {"schema": 1, "fingerprint": now, "changes": [*stored["changes"], changes]}
    write_atomically(path, json.dumps(record, indent=1).encode())
    return changes


def check_asked(path: Path, settings: GenerateSettings) -> None:
    """Compare what is known without asking a server: sampling and gates. Nothing is stored.

    Raises:
        RefusedError: they changed, and that was not asked for.
    """
    if settings.allow_change or not path.exists():
        return
    stored = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
    asked = fingerprint_of(settings, ServerIdentity("", ""))
    now = {**stored, "sampling": asked["sampling"], "gates": asked["gates"]}
    check_fingerprint(path, now, allow_change=False)


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary name, sync, rename: the file is the old one or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive the machine."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _differences(old: Any, new: Any, at: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [
            text for name in names for text in _differences(old.get(name), new.get(name), f"{at}.{name}".lstrip("."))
        ]
    return [] if old == new else [f"{at} was {_shown(old)}, is {_shown(new)}"]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
