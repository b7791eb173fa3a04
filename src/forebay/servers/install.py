"""Find the Python a server is installed in, and its version, from package metadata alone.

Nothing is imported and no interpreter is started: importing SGLang takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.causes import Cause
from forebay.errors import RefusedError
from forebay.paths import cache_dir

__all__ = ["Installation", "distribution_version", "find_installation"]


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment a server is installed in.

    Attributes:
        python: its interpreter.
        version: from the metadata of the distribution.
        recipe: the folder with what a start without accelerator needs (SGLang's stand-in launcher), or None.
    """

    python: Path
    version: str
    recipe: Path | None = None


def distribution_version(prefix: Path, names: Sequence[str]) -> str | None:
    """The version of the first of the distributions ``names`` found under ``prefix``, or None."""
    for site in sorted(prefix.glob("lib*/python3*/*-packages")):
        for name in names:
            for found in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
                return found.name.removesuffix(".dist-info").split("-", 1)[1]
    return None


def find_installation(server: str, distributions: Sequence[str], python: str | None = None) -> Installation:
    """Find ``server``: ``python`` if given, else this environment, the command on the PATH, ``$FOREBAY_CACHE/peers``.

    Raises:
        RefusedError: it is nowhere; the message lists the places looked at and how to install it.
    """
    peer = cache_dir() / "peers" / server
    candidates = [Path(python)] if python else [Path(sys.executable), *_on_path(server), peer / "bin" / "python"]
    for candidate in candidates:
        prefix = candidate.parent.parent
        if not os.access(candidate, os.X_OK):
            continue
        version = distribution_version(prefix, distributions)
        if version is not None and not _unfinished(prefix, peer):
            recipe = prefix / "cpu"
            return Installation(candidate, version, recipe if recipe.is_dir() else None)
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise RefusedError(
        f"{server} is not installed: no metadata of {' or '.join(distributions)} beside {looked}",
        fix=f"install it, or say where it is with --python PATH; for a machine without an accelerator: "
        f"python3.11 scripts/peers/install.py {server}",
        code=Cause.DEPENDENCY_MISSING,
    )


def _on_path(server: str) -> list[Path]:
    script = shutil.which(server)
    return [Path(script).resolve().parent / "python"] if script else []


def _unfinished(prefix: Path, peer: Path) -> bool:
    """Whether ``prefix`` is an installation that scripts/peers/install.py did not finish:
    it writes recipe.json last.
    """
    if prefix != peer:
        return False
    try:
        json.loads((prefix / "recipe.json").read_text())
    except (OSError, ValueError):
        return True
    return False
