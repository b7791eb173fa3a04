"""Ended runs that are kept for `forebay logs` and `forebay doctor`: the last few of each name,
and a bounded number in all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from forebay.paths import earlier_runs_dir, runs_dir

__all__ = ["KEPT_IN_ALL", "KEPT_PER_NAME", "archive_run", "prune_runs"]

KEPT_PER_NAME = 10
"""Earlier runs of one name, called NAME.1, NAME.2 and so on."""
KEPT_IN_ALL = 100
"""Ended runs over all names."""


def archive_run(folder: Path) -> Path:
    """Move the folder of an ended run to ``earlier/NAME.N``, N one more than the highest so far."""
    root = earlier_runs_dir()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = root / f"{folder.name}.{max(_numbers(root, folder.name), default=0) + 1}"
    folder.rename(target)
    return target


def prune_runs(name: str, *, may_remove: Callable[[Path], bool]) -> int:
    """Remove the oldest ended runs beyond the two limits; how many went.

    Args:
        name: the name whose earlier runs have just become one more.
        may_remove: whether a run's folder is of a run that has ended and has no process left.
    """
    earlier = earlier_runs_dir()
    numbers = sorted(_numbers(earlier, name))
    removed = sum(_remove(earlier / f"{name}.{number}") for number in numbers[:-KEPT_PER_NAME])
    folders = sorted((*_folders(earlier), *_folders(runs_dir())), key=_written_at)
    excess = len(folders) - KEPT_IN_ALL
    for folder in folders:
        if excess <= 0:
            break
        if folder.name != name and may_remove(folder):
            removed += _remove(folder)
            excess -= 1
    return removed


def _numbers(root: Path, name: str) -> list[int]:
    pattern = re.compile(re.escape(name) + r"\.(\d+)")
    matches = (pattern.fullmatch(folder.name) for folder in _folders(root))
    return [int(match[1]) for match in matches if match]


def _folders(root: Path) -> list[Path]:
    return [path.parent for path in root.glob("*/run.json")] if root.is_dir() else []


def _written_at(folder: Path) -> float:
    try:
        return (folder / "run.json").stat().st_mtime
    except OSError:
        return 0.0


def _remove(folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    return int(not folder.exists())
