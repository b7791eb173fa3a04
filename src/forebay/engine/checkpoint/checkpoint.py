"""A Hugging Face checkpoint folder, read tensor by tensor.

The safetensors format (an 8-byte little-endian header length, a JSON header, then the data) is read directly, so that
a rank reads only its slice of a tensor and holds no more than the slice: no memory map whose pages would count as ours.
Every shard's header is checked against the file's size before anything is loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.causes import Cause
from forebay.errors import UsageError

__all__ = ["Checkpoint", "Progress", "TensorEntry", "read_config"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total); never with more than in total."""

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_BLOCK_BYTES = 1 << 20
"""How much is read at once where only some columns of a matrix are wanted."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``path``."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of a checkpoint folder by name."""

    def __init__(self, folder: Path, entries: dict[str, TensorEntry]) -> None:
        self.folder = folder
        self.entries = entries

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read every shard's header.

        Raises:
            UsageError: no weights, a shard that is missing, truncated or corrupt, with the numbers.
        """
        shards, weight_map = _shards_of(folder)
        entries: dict[str, TensorEntry] = {}
        for shard in shards:
            entries.update(_read_header(shard))
        for name, shard_name in weight_map.items():
            entry = entries.get(name)
            if entry is None or entry.path.name != shard_name:
                raise UsageError(
                    f"{folder / shard_name} does not hold tensor {name}, which model.safetensors.index.json promises",
                    fix="download the checkpoint again",
                )
        return cls(folder, entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> TensorEntry:
        entry = self.entries.get(name)
        if entry is None:
            raise UsageError(f"{self.folder} has no tensor {name}", fix="check that config.json matches the weights")
        return entry

    def names(self) -> Iterable[str]:
        return self.entries.keys()

    def read(
        self,
        name: str,
        *,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensor, or its rows [a, b) and columns [a, b) (first and second dimension), in its stored dtype.

        Args:
            name: which.
            rows, cols: None: all.
            out: a contiguous tensor of the right shape and dtype to read into; None: a new one.

        Raises:
            UsageError: no such tensor, rows or columns that it does not have, or a file that cannot be read.
        """
        entry = self[name]
        shape = list(entry.shape)
        for axis, span in enumerate((rows, cols)):
            if span is not None:
                if axis >= len(shape) or span[1] > shape[axis]:
                    raise UsageError(
                        f"tensor {name} of {self.folder} has shape {entry.shape}: config.json asks for more of it",
                        fix="check that config.json matches the weights",
                    )
                shape[axis] = span[1] - span[0]
        result = torch.empty(shape, dtype=entry.dtype) if out is None else out
        if result.numel() == 0:
            return result
        target = memoryview(result.view(-1).view(torch.uint8).numpy().data)
        inner = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        offset = entry.offset + (rows[0] * inner if rows is not None else 0)
        try:
            with entry.path.open("rb") as file:
                if cols is None or shape[1] == entry.shape[1]:
                    _read_exactly(file.fileno(), offset, target)
                else:
                    rest = math.prod(entry.shape[2:]) * entry.dtype.itemsize
                    _read_columns(file.fileno(), offset, shape[0], inner, (cols[0] * rest, cols[1] * rest), target)
        except OSError as error:
            raise UsageError(f"reading tensor {name} from {entry.path} failed: {error}") from error
        return result


def shape_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as a dict.

    Raises:
        UsageError: no such file, or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no config.json", fix="give a Hugging Face model folder", code=Cause.CHECKPOINT_MISSING
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a JSON object")
    return config


def _shards_of(folder: Path) -> tuple[list[Path], dict[str, str]]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise UsageError(
                f"{folder} has no *.safetensors file",
                fix="give a folder with safetensors weights",
                code=Cause.CHECKPOINT_MISSING,
            )
        return shards, {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{index} cannot be read: {error!r}", fix="download the checkpoint again") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} of its {len(names)} shards: {', '.join(missing[:3])}",
            fix="download the checkpoint again",
            code=Cause.CHECKPOINT_MISSING,
        )
    return [folder / name for name in names], weight_map


def _read_header(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"it says its header is {length:,} bytes, the file has {size:,}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start, entries, end = 8 + length, {}, 0
        for name, record in header.items():
            begin, stop = record["data_offsets"]
            entry = TensorEntry(path, _DTYPES[record["dtype"]], tuple(record["shape"]), start + begin, stop - begin)
            if shape_bytes(entry.shape, entry.dtype) != entry.nbytes:
                raise ValueError(f"tensor {name} of shape {entry.shape} has {entry.nbytes:,} bytes")
            entries[name] = entry
            end = max(end, stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a sound safetensors file: {error}", fix="download it again", code=Cause.CHECKPOINT_CORRUPT
        ) from error
    if size != start + end:
        raise UsageError(
            f"{path} is {'truncated' if size < start + end else 'too long'}: {size:,} bytes, its header needs "
            f"{start + end:,}",
            fix="download it again",
            code=Cause.CHECKPOINT_CORRUPT,
        )
    return entries


def _read_exactly(fd: int, offset: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes at ``offset``."""
    done = 0
    while done < len(target):
        got = os.preadv(fd, [target[done : done + (1 << 30)]], offset + done)
        if got == 0:
            raise OSError(f"the file ends {len(target) - done:,} bytes early")
        done += got


def _read_columns(fd: int, offset: int, rows: int, row_bytes: int, span: tuple[int, int], target: memoryview) -> None:
    """Bytes [a, b) of each of ``rows`` rows of ``row_bytes`` that start at ``offset``."""
    out = np.frombuffer(target, dtype=np.uint8).reshape(rows, span[1] - span[0])
    step = max(1, min(rows, _BLOCK_BYTES // row_bytes))
    block = np.empty((step, row_bytes), dtype=np.uint8)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        _read_exactly(fd, offset + first * row_bytes, memoryview(block[:count].reshape(-1).data))
        out[first : first + count] = block[:count, span[0] : span[1]]
