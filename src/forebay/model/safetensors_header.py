"""Weight bytes of a safetensors checkpoint, by reading only its headers.

Format (safetensors): eight bytes little-endian length n, then n bytes of JSON mapping tensor names to dtype, shape and
``data_offsets`` relative to the end of the header. The file is complete when it ends where the last tensor does.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import UsageError

__all__ = ["TensorInfo", "checkpoint_files", "read_checkpoint", "read_header"]

_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoint's weight files: those the index names, else every ``*.safetensors`` in the folder.

    Raises:
        UsageError: a file the index names is missing, or the index cannot be read.
    """
    index = folder / _INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{index}: cannot be read as a weight index: {error}", code="checkpoint_corrupt") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UsageError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing, the first is {missing[0]}",
            fix="download the checkpoint again until it is complete",
            code="checkpoint_missing",
        )
    return [folder / name for name in names]


def read_checkpoint(folder: Path) -> Iterator[TensorInfo]:
    """Every tensor of the checkpoint in ``folder``.
    Raises UsageError as ``read_header`` and ``checkpoint_files`` do.
    """
    for path in checkpoint_files(folder):
        yield from read_header(path)


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one file.

    Raises:
        UsageError: the header or the file is cut short, or is no safetensors.
    """
    try:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else None
            if length is None or length > _MAX_HEADER_BYTES or 8 + length > size:
                raise _corrupt(path, f"its header asks for {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file", code="checkpoint_missing") from error
    except (OSError, ValueError) as error:
        raise _corrupt(path, f"its header cannot be read: {error}") from error
    tensors, end = [], 0
    try:
        for name, info in header.items():
            if name == "__metadata__":
                continue
            start, stop = info["data_offsets"]
            tensors.append(TensorInfo(name, info["dtype"], tuple(info["shape"]), stop - start))
            end = max(end, stop)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(path, f"its header has an entry of another form: {error!r}") from error
    if 8 + length + end != size:
        raise _corrupt(path, f"its tensors end at byte {8 + length + end:,}, the file at {size:,}")
    return tensors


def _corrupt(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path}: not a complete safetensors file: {what}",
        fix="download this file again",
        code="checkpoint_corrupt",
    )
