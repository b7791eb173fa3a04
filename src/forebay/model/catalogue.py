"""Well-known models by name: geometry facts with their source, so that a plan needs nothing on this machine.

The facts are in ``catalogue.json``: the fields of each model's published config.json that the planner reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

__all__ = ["CatalogueEntry", "entries", "find", "guess", "names"]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model.

    Args:
        name: what ``forebay plan`` calls it.
        aliases: other spellings, hub ids among them.
        source: where the facts were published.
        config: the fields of config.json.
        weights_known: False where the source gives the cache's geometry but not every matrix.
    """

    name: str
    aliases: tuple[str, ...]
    source: str
    config: Mapping[str, Any]
    weights_known: bool


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    """Every model of the catalogue; families share the fields under ``base``."""
    data = json.loads(resources.files("forebay.model").joinpath("catalogue.json").read_text(encoding="utf-8"))
    found = []
    for item in data["models"]:
        config = {**data["bases"].get(item.get("base", ""), {}), **item["config"]}
        aliases = tuple(item.get("aliases", ()))
        found.append(CatalogueEntry(item["name"], aliases, item["source"], config, item.get("weights_known", True)))
    return tuple(found)


def names() -> list[str]:
    """The names, sorted."""
    return sorted(entry.name for entry in entries())


def find(text: str) -> CatalogueEntry | None:
    """The entry that ``text`` names exactly, in any case; a hub organisation and a variant suffix are ignored.

    ``Qwen/Qwen3-235B-A22B-Instruct-2507-FP8`` is ``qwen3-235b-a22b`` with other weights: its cache is the same.
    """
    wanted = _normal(text)
    for entry in entries():
        if wanted in {_normal(entry.name), *(_normal(alias) for alias in entry.aliases)}:
            return entry
    return None


def guess(text: str) -> CatalogueEntry | None:
    """The entry whose name occurs in free text (``Llama-3.1-8B class``); the longest name that does."""
    exact = find(text)
    if exact is not None:
        return exact
    haystack = f"-{re.sub(r'[^a-z0-9.]+', '-', text.lower())}-"
    best: tuple[int, CatalogueEntry] | None = None
    for entry in entries():
        for spelling in (entry.name, *entry.aliases):
            needle = re.sub(r"[^a-z0-9.]+", "-", spelling.lower().rpartition("/")[2])
            if f"-{needle}-" in haystack and (best is None or len(needle) > best[0]):
                best = (len(needle), entry)
    return best[1] if best else None


_SUFFIX = re.compile(
    r"-(instruct|chat|it|base|thinking|reasoning|fp8|fp4|nvfp4|mxfp4|bf16|int4|int8|awq|gptq|dynamic|block|hf|v0\.1|v0\.3|\d{4})$"
)


def _normal(text: str) -> str:
    name = re.sub(r"[\s_]+", "-", text.strip().lower().rpartition("/")[2])
    while True:
        shorter = _SUFFIX.sub("", name)
        if shorter == name:
            return name
        name = shorter
