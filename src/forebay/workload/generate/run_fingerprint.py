"""The model, sampling and filters of a run, kept in ``run.json``: all rows of one data set are made with the same ones.

``run.json`` is ``{"schema", "fingerprint", "changes", "checksum"}``. The checksum covers fingerprint and changes, so
that damage is told from a changed setting.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import RefusedError
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.target import ServerIdentity

__all__ = ["check_asked", "check_fingerprint", "fingerprint_of", "read_run", "write_atomically"]


def fingerprint_of(settings: GenerateSettings, server: ServerIdentity) -> dict[str, Any]:
    """Everything that changes an answer or whether it is kept; not addresses, concurrency and retries."""
    sampling, filters = settings.sampling, settings.filters
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
        "filters": {
            **{name.value: action.value for name, action in filters.actions.items()},
            "retries": filters.retries,
            "tags": [filters.open_tag, filters.close_tag],
        },
    }


def check_fingerprint(path: Path, now: Mapping[str, Any], *, begun: bool, allow_change: bool) -> list[str]:
    """Compare with the stored fingerprint, storing ``now`` when there is none or when a change is allowed.

    Args:
        begun: the journal holds finished turns.

    Returns:
        What changed, one text per field; empty when nothing did. Every accepted change stays listed in the file.

    Raises:
        RefusedError: something changed, or the file is damaged or missing, and ``allow_change`` is not set.
    """
    stored = _read_run(path, begun)
    if stored is None:
        _write_run(path, now, [])
        return []
    if isinstance(stored, str):
        changes, earlier = [stored], []
        refusal = f"{stored}, so the model and settings of the finished turns are not known"
    else:
        changes = _differences(stored["fingerprint"], json.loads(json.dumps(now)))
        earlier = stored["changes"]
        refusal = f"this run was begun otherwise: {'; '.join(changes)} (recorded in {path})"
    if not changes:
        return []
    if not allow_change:
        raise RefusedError(
            refusal,
            fix="continue with the old settings, write to another output, "
            "or add --allow-change to mix both in one data set",
        )
    _write_run(path, now, [*earlier, changes])
    return changes


def check_asked(path: Path, settings: GenerateSettings, *, begun: bool) -> None:
    """Compare sampling and filters, which are known without a server. Nothing is stored.

    Raises:
        RefusedError: they changed, or the file is damaged or missing, and that was not asked for.
    """
    stored = None if settings.allow_change else _read_run(path, begun)
    if stored is None:
        return
    asked = fingerprint_of(settings, ServerIdentity("", ""))
    kept = {} if isinstance(stored, str) else stored["fingerprint"]
    now = {**kept, "sampling": asked["sampling"], "filters": asked["filters"]}
    check_fingerprint(path, now, begun=begun, allow_change=False)


def read_run(path: Path) -> dict[str, Any]:
    """The stored fingerprint and changes, for the manifest;
    both empty when every row was rejected before any was asked.
    """
    stored = _read_run(path, begun=False)
    if isinstance(stored, str):
        raise RefusedError(stored, fix="add --allow-change to go on without it")
    return stored or {"fingerprint": None, "changes": []}


def _read_run(path: Path, begun: bool) -> dict[str, Any] | str | None:
    """The stored record; a text that says what is wrong with it; None when there is none and none is needed."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return f"{path} is missing" if begun else None
    try:
        stored = json.loads(raw)
        whole = stored["checksum"] == _checksum(stored["fingerprint"], stored["changes"])
    except (ValueError, KeyError, TypeError):
        whole = False
    return stored if whole else f"{path} is damaged"


def _write_run(path: Path, fingerprint: Mapping[str, Any], changes: list[list[str]]) -> None:
    checksum = _checksum(fingerprint, changes)
    record = {"schema": 1, "fingerprint": fingerprint, "changes": changes, "checksum": checksum}
    write_atomically(path, json.dumps(record, indent=1).encode())


def _checksum(fingerprint: Mapping[str, Any], changes: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps([fingerprint, changes], sort_keys=True).encode()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the renames in a folder to disk."""
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
