"""The disk tier's folder belongs to one server at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from forebay.errors import RefusedError, UsageError

__all__ = ["take_folder"]


def take_folder(folder: Path) -> int:
    """Make ``folder`` if it is missing, and lock it; closing the returned descriptor releases the lock.

    Raises:
        RefusedError: another server holds it.
        UsageError: it cannot be used.
    """
    path = folder / "lock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"disk cache: cannot use {folder}: {error}", fix="check the path and its owner") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise RefusedError(
            f"disk cache: {folder} is in use by the server with pid {holder}",
            fix="stop that server, or give this one a folder of its own with --disk-cache",
        ) from error
    with contextlib.suppress(OSError):  # only for the message above: a full disk is no reason not to start
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
