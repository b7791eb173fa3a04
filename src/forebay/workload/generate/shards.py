"""One output file: JSON lines, or Parquet with the same columns."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Protocol

import msgspec

__all__ = ["JsonlShard", "ParquetShard", "Shard"]

_GROUP_ROWS = 1000  # rows in one Parquet row group, which is held in memory


class Shard(Protocol):
    """An output file."""

    def write(self, row: dict[str, Any]) -> None:
        """Add one row."""

    def close(self) -> tuple[int, str]:
        """Sync and close; returns the number of rows and the file's SHA-256."""


class JsonlShard:
    """One JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._handle = path.open("wb", buffering=1 << 20)
        self._hash = hashlib.sha256()
        self._rows = 0

    def write(self, row: dict[str, Any]) -> None:
        """Add one row."""
        line = msgspec.json.encode(row) + b"\n"
        self._hash.update(line)
        self._handle.write(line)
        self._rows += 1

    def close(self) -> tuple[int, str]:
        """Sync and close."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        return self._rows, self._hash.hexdigest()


class ParquetShard:
    """Columns ``id``, ``conversations`` (list of role, content, reasoning_content), ``status``, ``finish_reasons``,
    ``filters``.

    The bytes depend on the rows and on pyarrow's version only: row groups have a fixed number of rows.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        text = arrow.string()
        message = arrow.struct([("role", text), ("content", text), ("reasoning_content", text)])
        self._schema = arrow.schema(
            [
                ("id", text),
                ("conversations", arrow.list_(message)),
                ("status", text),
                ("finish_reasons", arrow.list_(text)),
                ("filters", arrow.list_(text)),
            ]
        )
        self._arrow = arrow
        self._path = path
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._group: list[dict[str, Any]] = []
        self._rows = 0

    def write(self, row: dict[str, Any]) -> None:
        """Add one row."""
        self._group.append(row)
        self._rows += 1
        if len(self._group) == _GROUP_ROWS:
            self._write_group()

    def close(self) -> tuple[int, str]:
        """Sync and close."""
        if self._group:
            self._write_group()
        self._writer.close()
        with self._path.open("rb") as handle:
            os.fsync(handle.fileno())
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return self._rows, digest

    def _write_group(self) -> None:
        self._writer.write_table(self._arrow.Table.from_pylist(self._group, schema=self._schema))
        self._group.clear()
