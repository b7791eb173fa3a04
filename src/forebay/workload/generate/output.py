"""The output: rows in input order, built from the input and the journal alone,
so that it depends on nothing that happened on the way.

A finished row is ``{"id", "conversations": [{"role", "content", "reasoning_content"?}], "status": "success",
"finish_reasons", "gates"?}``: what SpecForge's training reads (``id``, ``conversations``) and its validator wants
(``status``), one JSON object a line or the same columns in Parquet. Beside it: rows set aside and failed rows, each
with its reason, and a manifest. Every file is written under a temporary name and renamed; the manifest comes last and
holds the checksums of the rest.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import msgspec

from forebay.errors import ForebayError, UsageError
from forebay.workload.generate.index import Counts, Index, IndexEntry, input_changed
from forebay.workload.generate.journal import Journal, Record, read_turns
from forebay.workload.generate.rows import Malformed, Row
from forebay.workload.generate.run_fingerprint import read_run, sync_folder, write_atomically
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.generate.shards import JsonlShard, ParquetShard, Shard
from forebay.workload.generate.sources import RawRow, Rows, require_pyarrow

__all__ = ["Written", "check_output", "output_id", "output_row", "write_output"]

_SLICE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Written:
    """Where the output is: data files in order, and the manifest."""

    files: list[Path]
    set_aside: Path | None
    failed: Path | None
    manifest: Path
    reasons: Mapping[str, int]  # why rows were set aside, counted


def check_output(settings: GenerateSettings) -> None:
    """Refuse an output that cannot be what was asked, before hours are spent on it.

    Raises:
        UsageError: a format we do not write, no pyarrow, or a file where a folder is needed.
    """
    if settings.format not in ("jsonl", "parquet"):
        raise UsageError(f"output format {settings.format!r} is not known", fix="--format jsonl or --format parquet")
    if settings.format == "parquet":
        require_pyarrow("Parquet output")
    suffix = settings.output.suffix
    if suffix in (".jsonl", ".parquet") and suffix != f".{settings.format}":
        raise UsageError(f"{settings.output} does not fit --format {settings.format}", fix="leave --format out")
    if suffix not in (".jsonl", ".parquet") and settings.output.is_file():
        raise UsageError(f"{settings.output} is a file; without .jsonl or .parquet it would be a folder of shards")
    _check_not_foreign(settings)
    try:
        settings.work_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{settings.work_folder} cannot be made: {error.strerror}", fix="choose an --output you may write to"
        ) from error


def _check_not_foreign(settings: GenerateSettings) -> None:
    """What a run of ours did not write is not written over: least of all the input."""
    output = settings.output
    if output.exists() and settings.source.exists() and output.samefile(settings.source):
        raise UsageError(f"{output} is the input, and would be written over", fix="choose another --output")
    ours = (settings.work_folder / "journal.log").exists()
    if output.is_file() and not ours:
        raise UsageError(
            f"{output} is there already, and no run that could be continued lies beside it",
            fix="move it away, or choose another --output",
        )
    if output.is_dir() and not ours and any(output.glob(f"part-*.{settings.format}")):
        raise UsageError(
            f"{output} holds shards already, and no run that could be continued lies beside it",
            fix="move them away, or choose another --output",
        )


def output_id(entry_key: bytes, row: Row) -> str:
    """The id a row has in the output: its own, else one made of its content hash and ordinal."""
    return row.row_id if row.row_id is not None else f"row-{entry_key.hex()}"


def output_row(row_id: str, row: Row, turns: list[Record]) -> dict[str, Any]:
    """A finished row, as it is written."""
    conversation: list[dict[str, str]] = [{"role": "system", "content": text} for text in row.system]
    for prompt, turn in zip(row.prompts, turns):
        conversation.append({"role": "user", "content": prompt})
        answer = {"role": "assistant", "content": turn.c}
        if turn.r is not None:
            answer["reasoning_content"] = turn.r
        conversation.append(answer)
    gates = sorted({gate for turn in turns for gate in turn.g})
    return {
        "id": row_id,
        "conversations": conversation,
        "status": "success",
        "finish_reasons": [turn.f or "unknown" for turn in turns],
        **({"gates": gates} if gates else {}),
    }


@dataclass(slots=True)
class _Totals:
    """Sums over finished rows; they depend on input and answers only."""

    rows: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    gates: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, turns: list[Record]) -> None:
        self.rows += 1
        self.turns += len(turns)
        for turn in turns:
            self.prompt_tokens += turn.p
            self.output_tokens += turn.o
            self.finish_reasons[turn.f or "unknown"] += 1
            self.gates.update(turn.g)


def write_output(
    settings: GenerateSettings,
    source: Rows,
    parse: Callable[[RawRow], Row | Malformed],
    index: Index,
    journal: Journal,
    counts: Counts,
) -> Written:
    """Write everything; a second call writes the same bytes. Memory: a slice of rows.

    Raises:
        ForebayError: the rows written do not add up to ``counts``: our bug, and no manifest is written.
    """
    places = _Places(settings)
    places.manifest.unlink(missing_ok=True)
    totals = _Totals()
    with _Shards(settings, places) as shards, _Side(places.set_aside) as aside, _Side(places.failed) as failed:
        for done in _rows_done(source, parse, index, journal):
            if done.entry.state == "ok" and isinstance(done.row, Row):
                if len(done.turns) != len(done.row.prompts):
                    raise ForebayError(f"row {done.entry.pos + 1} ended with {len(done.turns)} turns: a bug in forebay")
                shards.write(output_row(output_id(done.entry.key, done.row), done.row, done.turns))
                totals.add(done.turns)
            else:
                failure = done.entry.state == "failed"
                (failed if failure else aside).write(_unfinished(done))
                totals.reasons[_reason_kind(done.entry.why)] += not failure
                totals.gates.update(gate for turn in done.turns for gate in turn.g)
    seen = Counts(totals.rows + aside.rows + failed.rows, totals.rows, aside.rows, failed.rows, 0, counts.orphans)
    if seen != counts:
        raise ForebayError(f"rows written do not add up, which is a bug in forebay: {seen} instead of {counts}")
    files = shards.publish()
    side_files = [side.publish() for side in (aside, failed)]
    manifest = _manifest(settings, counts, totals, shards.sums, files)
    write_atomically(places.manifest, json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n")
    reasons = {why: count for why, count in totals.reasons.items() if count}
    return Written(files, side_files[0], side_files[1], places.manifest, reasons)


class _Places:
    """Names of the output's files: beside a single file, inside a folder of shards."""

    def __init__(self, settings: GenerateSettings) -> None:
        output = settings.output
        self.single = output.suffix in (".jsonl", ".parquet")
        if self.single:
            self.folder = output.parent
            stem = output.with_suffix("")
            self.set_aside = stem.with_name(stem.name + ".set_aside.jsonl")
            self.failed = stem.with_name(stem.name + ".failed.jsonl")
            self.manifest = stem.with_name(stem.name + ".manifest.json")
        else:
            self.folder = output
            self.set_aside = output / "set_aside.jsonl"
            self.failed = output / "failed.jsonl"
            self.manifest = output / "manifest.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._output = output
        self._format = settings.format

    def shard(self, number: int) -> Path:
        if self.single:
            return self._output
        return self.folder / f"part-{number:05d}.{self._format}"

    def later_shards(self, number: int) -> list[Path]:
        """Shards of an earlier, longer output."""
        if self.single:
            return []
        ours = {self.shard(earlier) for earlier in range(number)}
        return [path for path in self.folder.glob(f"part-*.{self._format}") if path not in ours]


class _Opens(Protocol):
    def __call__(self, path: Path) -> Shard: ...


class _Shards:
    """Rows into shards of ``shard_rows``; nothing shows under its final name before ``publish``."""

    def __init__(self, settings: GenerateSettings, places: _Places) -> None:
        self.sums: list[tuple[int, str]] = []
        self._places = places
        self._rows = 0 if not places.single else None
        self._shard_rows = settings.shard_rows
        self._open: _Opens = ParquetShard if settings.format == "parquet" else JsonlShard
        self._shard: Shard | None = None
        self._temporary: list[Path] = []

    def __enter__(self) -> _Shards:
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
        if self._rows is not None:
            if self._rows == self._shard_rows:
                self._next()
                self._rows = 0
            self._rows += 1
        assert self._shard is not None, "entered before written to"
        self._shard.write(row)

    def publish(self) -> list[Path]:
        files = []
        for number, temporary in enumerate(self._temporary):
            final = self._places.shard(number)
            os.replace(temporary, final)
            files.append(final)
        for stale in self._places.later_shards(len(files)):
            stale.unlink()
        sync_folder(self._places.folder)
        return files

    def _next(self) -> None:
        if self._shard is not None:
            self.sums.append(self._shard.close())
        final = self._places.shard(len(self._temporary))
        path = final.with_name(final.name + ".tmp")
        self._shard = self._open(path)
        self._temporary.append(path)


class _Side:
    """Set-aside or failed rows, as JSON lines; no rows, no file."""

    def __init__(self, final: Path) -> None:
        self.rows = 0
        self._final = final
        self._temporary = final.with_name(final.name + ".tmp")
        self._handle: BinaryIO | None = None

    def __enter__(self) -> _Side:
        self._handle = self._temporary.open("wb")
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._handle is not None:
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()

    def write(self, row: dict[str, Any]) -> None:
        assert self._handle is not None, "entered before written to"
        self._handle.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
        self.rows += 1

    def publish(self) -> Path | None:
        if self.rows:
            os.replace(self._temporary, self._final)
            return self._final
        self._temporary.unlink()
        self._final.unlink(missing_ok=True)
        return None


@dataclass(frozen=True, slots=True)
class _Done:
    """One input row with all that became of it."""

    entry: IndexEntry
    raw: RawRow
    row: Row | Malformed
    turns: list[Record]


def _rows_done(
    source: Rows,
    parse: Callable[[RawRow], Row | Malformed],
    index: Index,
    journal: Journal,
) -> Iterator[_Done]:
    """Input, index and journal side by side, in input order."""
    rows = islice(source.rows(), index.input_rows)
    start = 0
    while batch := list(islice(rows, _SLICE_ROWS)):
        stop = start + len(batch)
        places = index.places_between(start, stop)
        for entry, raw in zip(index.window(start, stop), batch, strict=True):
            row = parse(raw)
            entry.check(row)
            yield _Done(entry, raw, row, read_turns(journal.fd, entry.key, places.get(entry.pos, ())))
        start = stop
    if start != index.input_rows:
        raise input_changed(f"it had {index.input_rows:,} rows, and has {start:,}")


def _unfinished(done: _Done) -> dict[str, Any]:
    entry, raw, row = done.entry, done.raw, done.row
    record: dict[str, Any] = {
        "id": output_id(entry.key, row) if isinstance(row, Row) else row.row_id,
        "input_row": entry.pos + 1,
        "status": entry.state,
        "reason": entry.why,
    }
    if done.turns:
        record["answers"] = [
            {"content": turn.c, "reasoning_content": turn.r, "finish_reason": turn.f, "gates": turn.g}
            for turn in done.turns
        ]
    record["input"] = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return record


def _reason_kind(why: str | None) -> str:
    """A reason without its particulars, for counting."""
    text = why or "unknown"
    if text.startswith("turn "):
        return text.split(": ", 1)[1]
    return "repeated id" if text.startswith("its id came before") else "malformed"


def _manifest(
    settings: GenerateSettings, counts: Counts, totals: _Totals, sums: list[tuple[int, str]], files: list[Path]
) -> dict[str, Any]:
    run = read_run(settings.work_folder / "run.json")
    return {
        "schema": 1,
        "format": settings.format,
        "columns": ["id", "conversations", "status", "finish_reasons", "gates"],
        "rows": {"input": counts.input, "ok": counts.ok, "set_aside": counts.set_aside, "failed": counts.failed},
        "set_aside_reasons": dict(sorted(totals.reasons.items())),
        "turns": totals.turns,
        "prompt_tokens": totals.prompt_tokens,
        "output_tokens": totals.output_tokens,
        "finish_reasons": dict(sorted(totals.finish_reasons.items())),
        "gates": dict(sorted(totals.gates.items())),
        "fingerprint": run["fingerprint"],
        "fingerprint_changes": run["changes"],
        "files": [
            {"name": path.name, "rows": rows, "sha256": digest}
            for path, (rows, digest) in zip(files, sums, strict=True)
        ],
    }
