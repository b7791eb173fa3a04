"""What a process was doing when a line was written: read from the frames of its traceback, else from the stage it had reached.

The same exception means different things in different activities: GPU memory that runs out while weights are loaded is a GPU that is
too small, while graphs are captured it is a pool that was sized too large. The table ``frame_activities.toml`` names modules and
functions of SGLang, vLLM, LMCache, Mooncake and torch; the innermost frame that the table knows decides.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from importlib.resources import files

from forebay.servers.log_patterns import Stage

__all__ = ["ProcessActivity", "activity_of_frames", "activity_of_message", "activity_of_stage"]


class ProcessActivity(StrEnum):
    """What a process does."""

    LAUNCH = "reading the command line and configuration"
    TOKENIZER = "loading the tokenizer"
    DOWNLOAD = "fetching the checkpoint"
    DISTRIBUTED = "connecting the ranks"
    WEIGHTS = "loading weights"
    PROFILING = "measuring memory"
    DEVICE_POOL = "allocating the device KV pool"
    HOST_POOL = "allocating the host KV pool"
    CAPTURE = "capturing graphs"
    COMPILING = "compiling kernels"
    WORKSPACE = "allocating a workspace"
    STORAGE = "connecting the storage backend"
    PORT = "opening a port"
    WARM_UP = "warming up"
    RUNNING = "running requests"
    UNKNOWN = "not known"


_OF_STAGE = {
    Stage.PREFLIGHT: ProcessActivity.LAUNCH,
    Stage.LAUNCHED: ProcessActivity.LAUNCH,
    Stage.LOADING: ProcessActivity.WEIGHTS,
    Stage.DEVICE_POOL: ProcessActivity.DEVICE_POOL,
    Stage.HOST_POOL: ProcessActivity.HOST_POOL,
    Stage.CAPTURING: ProcessActivity.CAPTURE,
    Stage.WARMING_UP: ProcessActivity.WARM_UP,
    Stage.SERVING: ProcessActivity.RUNNING,
}


def activity_of_stage(stage: Stage | None) -> ProcessActivity:
    """The activity that a stage of the start stands for."""
    return _OF_STAGE.get(stage, ProcessActivity.UNKNOWN) if stage is not None else ProcessActivity.UNKNOWN


def activity_of_frames(innermost_first: Iterable[str]) -> ProcessActivity:
    """The activity that the innermost known frame names.

    Args:
        innermost_first: the text of the frames (file lines and their code), the innermost first.
    """
    for text in innermost_first:
        for activity, known in _table("frames"):
            if known.search(text):
                return activity
    return ProcessActivity.UNKNOWN


def activity_of_message(text: str) -> ProcessActivity:
    """The activity that an error names in words of its own."""
    return next((activity for activity, known in _table("messages") if known.search(text)), ProcessActivity.UNKNOWN)


@cache
def _table(column: str) -> tuple[tuple[ProcessActivity, re.Pattern[str]], ...]:
    text = (files("forebay.operation.doctor") / "frame_activities.toml").read_text(encoding="utf-8")
    rows = ((ProcessActivity[name.upper()], row.get(column)) for name, row in tomllib.loads(text).items())
    return tuple((activity, re.compile("|".join(patterns))) for activity, patterns in rows if patterns)
