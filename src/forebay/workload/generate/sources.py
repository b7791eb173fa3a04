"""Input files as one stream of raw rows, always in the same order: files by name, rows as they are in the file.

JSONL (also gzip), Parquet, and folders: of such files, or a Hugging Face dataset as ``save_to_disk`` writes it (Arrow
files listed in ``state.json``) or as a repository holds it (``data/*.parquet``). Memory: one batch of 256 rows.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from forebay.errors import UsageError

__all__ = ["RawRow", "Rows", "Source", "open_source", "require_pyarrow"]

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson")
_BATCH_ROWS = 256
RawRow = bytes | dict[str, Any]


class Rows(Protocol):
    """An input: the same rows in the same order at each reading."""

    def rows(self) -> Iterator[RawRow]:
        """Every row."""


@dataclass(frozen=True, slots=True)
class Source:
    """An input: files of one format, in order."""

    path: Path
    kind: str
    files: tuple[Path, ...]

    def rows(self) -> Iterator[RawRow]:
        """Every row, in order; blank lines of JSONL are skipped.

        Raises:
            UsageError: a file is damaged, cut short, or not of the format of its name. Rows before the damage were
                returned.
        """
        readers: dict[str, Callable[[Path], Iterator[RawRow]]] = {
            "jsonl": _jsonl_rows,
            "parquet": _parquet_rows,
            "arrow": _arrow_rows,
        }
        read = readers[self.kind]
        for file in self.files:
            count = 0
            try:
                for row in read(file):
                    yield row
                    count += 1
            except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow raises ValueErrors and OSErrors
                raise UsageError(
                    f"input: {file} cannot be read after {count:,} rows: {' '.join(str(error).split())}",
                    fix="check that it is complete and of the format of its name; copy it again, or leave it out",
                ) from error


def open_source(path: Path, *, split: str | None = None) -> Source:
    """Open an input.

    Args:
        path: a file or a folder.
        split: which split of a dataset folder that has several.

    Raises:
        UsageError: nothing there, nothing in it, an unknown format, or a split must be chosen.
    """
    if path.is_file():
        return _file_source(path)
    if not path.is_dir():
        raise UsageError(f"input: {path} does not exist", fix="name a JSONL or Parquet file, or a dataset folder")
    if (path / "dataset_dict.json").is_file():
        splits = _read_json(path / "dataset_dict.json", lambda content: [str(name) for name in content["splits"]])
        return open_source(path / _choose(path, splits, split))
    if (path / "state.json").is_file():
        names = _read_json(path / "state.json", lambda content: [entry["filename"] for entry in content["_data_files"]])
        files = tuple(path / name for name in names)
        require_pyarrow("a Hugging Face dataset folder")
        return Source(path, "arrow", files)
    return _folder_source(path, split)


def _read_json(path: Path, read: Callable[[Any], list[str]]) -> list[str]:
    """What ``read`` takes from a JSON file of a dataset folder."""
    try:
        return read(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"input: {path} cannot be read: {type(error).__name__} {error}", fix="copy the dataset again"
        ) from error


def require_pyarrow(what: str) -> None:
    """Raise UsageError with the install command when pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{what} needs pyarrow", fix="pip install 'forebay[data]'") from error


def _file_source(path: Path) -> Source:
    if path.name.endswith(_JSONL):
        return Source(path, "jsonl", (path,))
    if path.suffix == ".parquet":
        require_pyarrow("a Parquet file")
        return Source(path, "parquet", (path,))
    if path.suffix == ".arrow":
        require_pyarrow("an Arrow file")
        return Source(path, "arrow", (path,))
    if path.suffix == ".json":
        raise UsageError(
            f"input: {path} is one JSON document, which cannot be streamed",
            fix=f"jq -c '.[]' {path} > {path.with_suffix('.jsonl')}",
        )
    raise UsageError(f"input: {path}: unknown format", fix="use .jsonl, .jsonl.gz, .parquet or a dataset folder")


def _folder_source(path: Path, split: str | None) -> Source:
    folder = path / "data" if (path / "data").is_dir() else path
    for kind, endings in (("parquet", (".parquet",)), ("arrow", (".arrow",)), ("jsonl", _JSONL)):
        files = sorted(file for file in folder.iterdir() if file.name.endswith(endings))
        if not files:
            continue
        if kind != "jsonl":
            require_pyarrow(f"a folder of {kind} files")
        splits = sorted({file.name.split("-")[0].split(".")[0] for file in files})
        if split is not None or (kind == "parquet" and folder.name == "data" and len(splits) > 1):
            chosen = _choose(path, splits, split)
            files = [file for file in files if file.name.startswith((f"{chosen}-", f"{chosen}."))]
        return Source(path, kind, tuple(files))
    raise UsageError(f"input: {path} holds no JSONL, Parquet or Arrow files", fix="name the folder that holds the data")


def _choose(path: Path, splits: list[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is not None and split in splits:
        return split
    asked = "has several splits" if split is None else f"has no split {split!r}"
    raise UsageError(f"input: {path} {asked}: {', '.join(splits)}", fix=f"--split {splits[0]}")


def _jsonl_rows(file: Path) -> Iterator[bytes]:
    with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb", buffering=1 << 20) as handle:
        first = True
        for line in cast(BinaryIO, handle):
            if first:
                line, first = line.removeprefix(b"\xef\xbb\xbf"), False
            stripped = line.strip()
            if stripped:
                yield stripped


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
            yield from batch.to_pylist()


def _arrow_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as arrow

    with arrow.memory_map(str(file), "r") as mapped:
        for batch in _arrow_reader(arrow, mapped):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from batch.slice(start, _BATCH_ROWS).to_pylist()


def _arrow_reader(arrow: Any, mapped: Any) -> Iterator[Any]:
    """Record batches of either Arrow format: the stream format (which ``datasets`` writes) or the file format."""
    try:
        yield from arrow.ipc.open_stream(mapped)
    except arrow.ArrowInvalid:
        mapped.seek(0)
        reader = arrow.ipc.open_file(mapped)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
