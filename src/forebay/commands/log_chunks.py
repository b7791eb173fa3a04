"""A run's log or events in pieces: the last lines, then what is written, each byte once.

A piece carries the file's inode and the offset behind it. A reader that comes back after a lost connection gives both,
and gets what follows; where the file has been replaced since, it gets the new one from its beginning.
"""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

from forebay.commands.requests import LogsRequest
from forebay.operation.output import Output, make_event
from forebay.runs.run_record import open_run

__all__ = ["send_log"]

_PIECE = 1 << 18
_POLL_S = 0.2


def send_log(request: LogsRequest, output: Output) -> dict[str, Any]:
    """Send the log of a run as ``log_piece`` events; with ``follow`` until the run has ended.

    Raises:
        UsageError: there is no such run.
    """
    run = open_run(request.name)
    path = run.events_path if request.events else run.log_path
    if request.path_only:
        return {"exit_code": 0, "path": str(path)}
    offset, inode = request.offset, request.inode
    if offset is None:
        offset, inode = _send_last_lines(path, request.lines, output)
    while True:
        ended = run.read().ended
        offset, inode = _send_from(path, offset, inode, output)
        if ended or not request.follow:
            return {"exit_code": 0, "path": str(path)}
        time.sleep(_POLL_S)


def _send_last_lines(path: Path, lines: int, output: Output) -> tuple[int, int | None]:
    """The last ``lines`` lines; returns the offset after them. Reads from the end, because a log may be large."""
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return 0, None
    with source:
        size, inode = source.seek(0, 2), path.stat().st_ino
        block = min(size, max(1 << 16, lines * 512))
        source.seek(size - block)
        kept = b"".join(source.read(block).splitlines(keepends=True)[-lines:]) if lines else b""
    _send(output, b"", size - len(kept), inode)  # a reader that comes back goes on from here
    for start in range(0, len(kept), _PIECE):
        piece = kept[start : start + _PIECE]
        _send(output, piece, size - len(kept) + start + len(piece), inode)
    return size, inode


def _send_from(path: Path, offset: int, inode: int | None, output: Output) -> tuple[int, int | None]:
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return offset, inode
    with source:
        now, size = path.stat().st_ino, source.seek(0, 2)
        if (inode is not None and now != inode) or size < offset:
            offset = 0
        source.seek(offset)
        while piece := source.read(_PIECE):
            offset += len(piece)
            _send(output, piece, offset, now)
    return offset, now


def _send(output: Output, piece: bytes, offset: int, inode: int | None) -> None:
    output.event(make_event("log_piece", data=base64.b64encode(piece).decode(), inode=inode), offset=offset)
