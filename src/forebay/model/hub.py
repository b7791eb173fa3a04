"""A model on the Hugging Face hub that is not on this machine: its config.json and the size its weight index states.

Two small files, a few seconds at most, nothing kept. ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` mean what they mean to the
hub's own client.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from forebay.errors import UsageError

__all__ = ["HubModel", "fetch", "is_hub_id"]

_TIMEOUT_S = 4.0
_MOST_BYTES = 64 * 2**20

HubModel = tuple[dict[str, Any], int | None, str]
"""(config.json, weight bytes where the index states them, address of the config)."""


def is_hub_id(text: str) -> bool:
    """``organisation/name``."""
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith("/")


def fetch(hub_id: str) -> HubModel:
    """Read ``hub_id`` from the hub.

    Raises:
        UsageError: offline, not reachable, not there, or not for us (gated).
    """
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise _unreachable(hub_id, "HF_HUB_OFFLINE is set")
    base = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{hub_id}/resolve/main"
    config = _get(hub_id, f"{base}/config.json")
    try:
        index = _get(hub_id, f"{base}/model.safetensors.index.json")
        size = index["metadata"]["total_size"]
    except (UsageError, KeyError, TypeError):
        size = None  # one file without an index, or another format: then the formula counts
    return config, size if isinstance(size, int) else None, f"{base}/config.json"


def _get(hub_id: str, address: str) -> dict[str, Any]:
    request = urllib.request.Request(address)
    token = os.environ.get("HF_TOKEN")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            data = json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UsageError(
                f"the hub answers {error.code} for {hub_id}: gated, private, or not there",
                fix="set HF_TOKEN to a token that may read it, or give a folder",
                code="license_or_auth",
            ) from error
        raise _unreachable(hub_id, f"the hub answers {error.code}") from error
    except (OSError, ValueError) as error:
        raise _unreachable(hub_id, str(getattr(error, "reason", error))) from error
    if not isinstance(data, dict):
        raise _unreachable(hub_id, f"{address} is no object")
    return data


def _unreachable(hub_id: str, why: str) -> UsageError:
    return UsageError(
        f"model {hub_id!r} is not on this machine, not in the catalogue, and the hub cannot be read: {why}",
        fix="give a folder with its config.json, or a name of the catalogue (`forebay plan --help`)",
        code="checkpoint_missing",
    )
