"""The files of an output and their names. Each is written under a temporary name and renamed."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import msgspec

from forebay.workload.generate.run_fingerprint import sync_folder
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.generate.shards import JsonlShard, ParquetShard, Shard

__all__ = ["JsonLinesFile", "OutputPaths", "ShardFiles"]


class OutputPaths:
    """Names of the output's files: beside a single file, or inside a folder of shards."""

    def __init__(self, settings: GenerateSettings) -> None:
        output = settings.output
        self.single = output.suffix in (".jsonl", ".parquet")
        if self.single:
            self.folder = output.parent
            stem = output.with_suffix("")
            self.rejected = stem.with_name(stem.name + ".rejected.jsonl")
            self.failed = stem.with_name(stem.name + ".failed.jsonl")
            self.manifest = stem.with_name(stem.name + ".manifest.json")
        else:
            self.folder = output
            self.rejected = output / "rejected.jsonl"
            self.failed = output / "failed.jsonl"
            self.manifest = output / "manifest.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._output = output
        self._format = settings.format

    def shard(self, number: int) -> Path:
        """The file of a shard; the output itself when that is a single file."""
        if self.single:
            return self._output
        return self.folder / f"part-{number:05d}.{self._format}"

    def later_shards(self, number: int) -> list[Path]:
        """Shards of an earlier, longer output."""
        if self.single:
            return []
        current = {self.shard(earlier) for earlier in range(number)}
        return [path for path in self.folder.glob(f"part-*.{self._format}") if path not in current]


class _OpenShard(Protocol):
    def __call__(self, path: Path) -> Shard: ...


class ShardFiles:
    """Writes rows into shards of ``shard_rows``. Files get their final names in ``publish``; an error removes them."""

    def __init__(self, settings: GenerateSettings, paths: OutputPaths) -> None:
        self.sums: list[tuple[int, str]] = []
        self._paths = paths
        self._rows = 0 if not paths.single else None
        self._shard_rows = settings.shard_rows
        self._open: _OpenShard = ParquetShard if settings.format == "parquet" else JsonlShard
        self._shard: Shard | None = None
        self._temporary: list[Path] = []

    def __enter__(self) -> ShardFiles:
        self._next()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._shard is not None:
            self.sums.append(self._shard.close())
        if kind is not None:
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def write(self, row: dict[str, Any]) -> None:
        """Add one row."""
        if self._rows is not None:
            if self._rows == self._shard_rows:
                self._next()
                self._rows = 0
            self._rows += 1
        assert self._shard is not None, "entered before written to"
        self._shard.write(row)

    def publish(self) -> list[Path]:
        """Rename the files, and remove the shards of an earlier, longer output."""
        files = []
        for number, temporary in enumerate(self._temporary):
            final = self._paths.shard(number)
            os.replace(temporary, final)
            files.append(final)
        for stale in self._paths.later_shards(len(files)):
            stale.unlink()
        sync_folder(self._paths.folder)
        return files

    def _next(self) -> None:
        if self._shard is not None:
            self.sums.append(self._shard.close())
        final = self._paths.shard(len(self._temporary))
        path = final.with_name(final.name + ".tmp")
        self._shard = self._open(path)
        self._temporary.append(path)


class JsonLinesFile:
    """Rejected or failed rows, as JSON lines; without rows there is no file."""

    def __init__(self, final: Path) -> None:
        self.rows = 0
        self._final = final
        self._temporary = final.with_name(final.name + ".tmp")
        self._handle: BinaryIO | None = None

    def __enter__(self) -> JsonLinesFile:
        self._handle = self._temporary.open("wb")
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._handle is not None:
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()

    def write(self, row: dict[str, Any]) -> None:
        """Add one row."""
        assert self._handle is not None, "entered before written to"
        self._handle.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
        self.rows += 1

    def publish(self) -> Path | None:
        """Rename the file; None when it has no rows."""
        if self.rows:
            os.replace(self._temporary, self._final)
            return self._final
        self._temporary.unlink()
        self._final.unlink(missing_ok=True)
        return None
