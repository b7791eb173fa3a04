"""Where Forebay keeps things; the only module that reads FOREBAY_HOME and FOREBAY_CACHE."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir", "earlier_runs_dir", "home_dir", "runs_dir"]


def home_dir() -> Path:
    """State: ``$FOREBAY_HOME``, else ``~/.local/state/forebay``."""
    return Path(os.environ.get("FOREBAY_HOME") or Path.home() / ".local" / "state" / "forebay")


def runs_dir() -> Path:
    """One folder per run: ``run.json``, ``plan.json``, ``server.log``, ``events.jsonl``."""
    return home_dir() / "runs"


def earlier_runs_dir() -> Path:
    """Ended runs whose name has been used again: ``NAME.1``, ``NAME.2`` and so on, a bounded number."""
    return home_dir() / "earlier"


def cache_dir() -> Path:
    """Downloads, converted models and built libraries: ``$FOREBAY_CACHE``, else ``~/.cache/forebay``."""
    return Path(os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay")
