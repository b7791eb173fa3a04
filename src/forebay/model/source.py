"""Where a model comes from: a folder, a GGUF file, a catalogue name, or a hub id (on this machine,
else from the hub).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import UsageError
from forebay.model.catalogue import find, names
from forebay.model.families import load_geometry, read_geometry
from forebay.model.geometry import ModelGeometry
from forebay.model.gguf_header import config_of, read_gguf
from forebay.model.hub import fetch, is_hub_id
from forebay.model.parameters import Component, from_geometry, from_headers, share_of, total_bytes
from forebay.model.safetensors_header import checkpoint_files, read_checkpoint

__all__ = ["ModelSource", "resolve"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as planned.

    Args:
        name: as the user gave it; goes into the command line.
        kind: ``folder``, ``gguf``, ``catalogue`` or ``hub``.
        components: its weights; empty where they are not known.
        weights_how: where the weights' bytes come from.
        facts_source: where the geometry comes from.
        location: what a server is given to load it: the folder, the file, or the hub id.
    """

    name: str
    kind: str
    path: Path | None
    geometry: ModelGeometry
    components: tuple[Component, ...]
    weights_how: str
    facts_source: str
    location: str


def resolve(text: str) -> ModelSource:
    """Find the model ``text`` names.

    Raises:
        UsageError: nothing of that name, or its files are incomplete.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_folder(text, path, "folder")
    if path.suffix == ".gguf":
        return _from_gguf(text, path)
    if path.is_file():
        raise UsageError(f"{text}: is a file, but no .gguf", fix="give the model's folder, a .gguf file, or a name")
    snapshot = _hub_snapshot(text)
    if snapshot is not None:
        return _from_folder(text, snapshot, "hub")
    looks_like_path = text.startswith((".", "/", "~")) or text.count("/") > 1
    entry = None if looks_like_path else find(text)
    if entry is not None:
        geometry = read_geometry(entry.config, f"catalogue: {entry.name}")
        weights = tuple(from_geometry(geometry)) if entry.weights_known else ()
        hub_id = next((alias for alias in entry.aliases if "/" in alias), entry.name)
        location = text if "/" in text else hub_id
        how = (
            "formula from the geometry" if weights else "not known: the catalogue has only this model's cache geometry"
        )
        return ModelSource(text, "catalogue", None, geometry, weights, how, entry.source, location)
    if is_hub_id(text):
        return _from_hub(text)
    if looks_like_path:
        raise UsageError(f"{text}: no such folder or file", code="checkpoint_missing")
    raise UsageError(
        f"model {text!r} is no folder, no .gguf file, no hub id (organisation/name), and not in the catalogue",
        fix=f"download it and give its folder, or use one of: {', '.join(names())}",
        code="checkpoint_missing",
    )


def _from_folder(text: str, folder: Path, kind: str) -> ModelSource:
    config = folder / "config.json"
    if not config.exists():
        found = sorted(folder.glob("*.gguf"))
        if found:
            return _from_gguf(text, found[0])
    geometry = load_geometry(config)
    files = checkpoint_files(folder)
    if files:
        weights = tuple(from_headers(read_checkpoint(folder), geometry.num_layers))
        how = f"headers of {len(files)} safetensors file{'s' if len(files) != 1 else ''}"
    else:
        weights, how = tuple(from_geometry(geometry)), "formula from config.json: no safetensors here"
    return ModelSource(text, kind, folder, geometry, weights, how, str(config), text)


def _from_gguf(text: str, path: Path) -> ModelSource:
    header = read_gguf(path)
    geometry = read_geometry(config_of(header, path), str(path))
    sizes: dict[str, Component] = {}
    for name, _, size in header.tensors:
        share = share_of(name)
        known = sizes.get(share.value)
        sizes[share.value] = Component(share.value, size + (known.size_bytes if known else 0), share)
    return ModelSource(text, "gguf", path, geometry, tuple(sizes.values()), "header of the GGUF file", str(path), text)


def _from_hub(text: str) -> ModelSource:
    """From the hub itself: the geometry, and the weights as the index states them,
    shared out as the formula has them.
    """
    config, size, address = fetch(text)
    geometry = read_geometry(config, address)
    parts = from_geometry(geometry)
    how = "formula from the hub's config.json"
    if size is not None:
        factor = size / total_bytes(parts)
        parts = [Component(part.name, round(part.size_bytes * factor), part.share) for part in parts]
        how = "the hub's weight index, shared out by formula"
    return ModelSource(text, "hub", None, geometry, tuple(parts), how, address, text)


def _hub_snapshot(text: str) -> Path | None:
    """The newest snapshot of a hub id in the local Hugging Face cache; nothing is downloaded."""
    if text.count("/") != 1:
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{text.replace('/', '--')}" / "snapshots"
    if not cache.is_dir():
        return None
    snapshots = [folder for folder in cache.iterdir() if (folder / "config.json").exists()]
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)
