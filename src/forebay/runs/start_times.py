"""How long the stages of earlier starts took, one line per start in ``$FOREBAY_HOME/start_times.jsonl``.

Kept apart from the runs, so that telling a slow stage needs one small file and not the record of every run.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence

from forebay.paths import home_dir

__all__ = ["earlier_start_times", "note_start_times"]

_MAX_LINES = 400
_COMPARED = 20


def note_start_times(server: str, model: str, seconds: Mapping[str, float]) -> None:
    """Append one start: stage name -> seconds. Beyond 400 lines the older half is dropped."""
    path = home_dir() / "start_times.jsonl"
    line = json.dumps({"server": server, "model": model, "stages": dict(seconds)})
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = [*file.read().splitlines(), line]
        kept = lines if len(lines) <= _MAX_LINES else lines[-_MAX_LINES // 2 :]
        file.seek(0)
        file.truncate()
        file.write("\n".join(kept) + "\n")


def earlier_start_times(server: str, model: str) -> Sequence[Mapping[str, float]]:
    """Stage name -> seconds of the last 20 starts of the same server and model, oldest first."""
    try:
        lines: Sequence[str] = (home_dir() / "start_times.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
            if (entry["server"], entry["model"]) == (server, model):
                found.append({str(name): float(value) for name, value in entry["stages"].items()})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a line cut short by a full disk
    return found[-_COMPARED:]
