"""/dev/shm: a memory file system with a size of its own (64 MB by default in containers)."""

from __future__ import annotations

import os

__all__ = ["SHM_FOLDER", "free_shm_bytes"]

SHM_FOLDER = "/dev/shm"


def free_shm_bytes() -> int | None:
    """What can still be written there; None where there is none."""
    try:
        space = os.statvfs(SHM_FOLDER)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize
