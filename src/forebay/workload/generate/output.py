"""The output: rows in input order, made from the input and the journal alone, so it does not depend on how often a run
was interrupted.

A finished row is ``{"id", "conversations": [{"role", "content", "reasoning_content"?}], "status": "success",
"finish_reasons", "filters"?}``: what SpecForge's training reads (``id``, ``conversations``) and its validator needs
(``status``), one JSON object per line or the same columns in Parquet. Beside it: rejected and failed rows, each with
its reason, and a manifest. The manifest is written last and holds the checksums of the rest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, UsageError
from forebay.workload.generate.index import Counts, Index, IndexEntry, input_changed
from forebay.workload.generate.journal import Journal, Record, read_turns
from forebay.workload.generate.output_files import JsonLinesFile, OutputPaths, ShardFiles
from forebay.workload.generate.rows import Malformed, Row
from forebay.workload.generate.run_fingerprint import read_run, write_atomically
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.generate.sources import RawRow, Rows, require_pyarrow

__all__ = ["Written", "check_output", "output_id", "output_row", "write_output"]

_SLICE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Written:
    """The files of the output: data files in order, and the manifest."""

    files: list[Path]
    rejected: Path | None
    failed: Path | None
    manifest: Path
    reasons: Mapping[str, int]  # reasons of the rejected rows, counted


def check_output(settings: GenerateSettings) -> None:
    """Refuse an output that cannot be written, before anything is generated.

    Raises:
        UsageError: an unknown format, no pyarrow, a file where a folder is needed, or files of another origin.
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
    """Refuse to write over the input, or over files that no run of ``generate`` wrote."""
    output = settings.output
    if output.exists() and settings.source.exists() and output.samefile(settings.source):
        raise UsageError(f"{output} is the input, and would be written over", fix="choose another --output")
    own = (settings.work_folder / "journal.log").exists()
    if output.is_file() and not own:
        raise UsageError(
            f"{output} exists already, and there is no run beside it that could be continued",
            fix="move it away, or choose another --output",
        )
    if output.is_dir() and not own and any(output.glob(f"part-*.{settings.format}")):
        raise UsageError(
            f"{output} holds shards already, and there is no run beside it that could be continued",
            fix="move them away, or choose another --output",
        )


def output_id(entry_key: bytes, row: Row) -> str:
    """The id of a row in the output: its own, else one made of its key."""
    return row.row_id if row.row_id is not None else f"row-{entry_key.hex()}"


def output_row(row_id: str, row: Row, turns: list[Record]) -> dict[str, Any]:
    """A finished row as it is written."""
    conversation: list[dict[str, str]] = [{"role": "system", "content": text} for text in row.system]
    for prompt, turn in zip(row.prompts, turns):
        conversation.append({"role": "user", "content": prompt})
        answer = {"role": "assistant", "content": turn.c}
        if turn.r is not None:
            answer["reasoning_content"] = turn.r
        conversation.append(answer)
    filters = sorted({name for turn in turns for name in turn.g})
    return {
        "id": row_id,
        "conversations": conversation,
        "status": "success",
        "finish_reasons": [turn.f or "unknown" for turn in turns],
        **({"filters": filters} if filters else {}),
    }


@dataclass(slots=True)
class _Totals:
    """Sums over the rows of the output; they depend on input and answers only."""

    rows: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    filters: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, turns: list[Record]) -> None:
        self.rows += 1
        self.turns += len(turns)
        for turn in turns:
            self.prompt_tokens += turn.p
            self.output_tokens += turn.o
            self.finish_reasons[turn.f or "unknown"] += 1
            self.filters.update(turn.g)


def write_output(
    settings: GenerateSettings,
    source: Rows,
    parse: Callable[[RawRow], Row | Malformed],
    index: Index,
    journal: Journal,
    counts: Counts,
) -> Written:
    """Write all files; a second call writes the same bytes. Memory: one slice of rows.

    Raises:
        UsageError: the input was changed since it was indexed.
        ForebayError: the rows written do not add up to ``counts``, which is a bug; no manifest is written.
    """
    paths = OutputPaths(settings)
    paths.manifest.unlink(missing_ok=True)
    totals = _Totals()
    with (
        ShardFiles(settings, paths) as shards,
        JsonLinesFile(paths.rejected) as rejected,
        JsonLinesFile(paths.failed) as failed,
    ):
        for finished in _finished_rows(source, parse, index, journal):
            if finished.entry.state == "ok" and isinstance(finished.row, Row):
                if len(finished.turns) != len(finished.row.prompts):
                    raise ForebayError(
                        f"row {finished.entry.pos + 1} ended with {len(finished.turns)} turns: a bug in forebay"
                    )
                shards.write(output_row(output_id(finished.entry.key, finished.row), finished.row, finished.turns))
                totals.add(finished.turns)
            else:
                failure = finished.entry.state == "failed"
                (failed if failure else rejected).write(_side_row(finished))
                totals.reasons[_reason_kind(finished.entry.reason)] += not failure
                totals.filters.update(name for turn in finished.turns for name in turn.g)
    seen = Counts(totals.rows + rejected.rows + failed.rows, totals.rows, rejected.rows, failed.rows, 0, counts.orphans)
    if seen != counts:
        raise ForebayError(f"rows written do not add up, which is a bug in forebay: {seen} instead of {counts}")
    files = shards.publish()
    side_files = [side.publish() for side in (rejected, failed)]
    manifest = _manifest(settings, counts, totals, shards.sums, files)
    write_atomically(paths.manifest, json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n")
    reasons = {reason: count for reason, count in totals.reasons.items() if count}
    return Written(files, side_files[0], side_files[1], paths.manifest, reasons)


@dataclass(frozen=True, slots=True)
class _FinishedRow:
    """One input row with its state and its turns."""

    entry: IndexEntry
    raw: RawRow
    row: Row | Malformed
    turns: list[Record]


def _finished_rows(
    source: Rows,
    parse: Callable[[RawRow], Row | Malformed],
    index: Index,
    journal: Journal,
) -> Iterator[_FinishedRow]:
    """Input, index and journal side by side, in input order."""
    rows = islice(source.rows(), index.input_rows)
    start = 0
    while batch := list(islice(rows, _SLICE_ROWS)):
        stop = start + len(batch)
        paths = index.places_between(start, stop)
        for entry, raw in zip(index.window(start, stop), batch, strict=True):
            row = parse(raw)
            entry.check(row)
            yield _FinishedRow(entry, raw, row, read_turns(journal.fd, entry.key, paths.get(entry.pos, ())))
        start = stop
    if start != index.input_rows:
        raise input_changed(f"it had {index.input_rows:,} rows, and has {start:,}")


def _side_row(finished: _FinishedRow) -> dict[str, Any]:
    entry, raw, row = finished.entry, finished.raw, finished.row
    record: dict[str, Any] = {
        "id": output_id(entry.key, row) if isinstance(row, Row) else row.row_id,
        "input_row": entry.pos + 1,
        "status": entry.state,
        "reason": entry.reason,
    }
    if finished.turns:
        record["answers"] = [
            {"content": turn.c, "reasoning_content": turn.r, "finish_reason": turn.f, "filters": turn.g}
            for turn in finished.turns
        ]
    record["input"] = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return record


def _reason_kind(reason: str | None) -> str:
    """The kind of a reason, for counting."""
    text = reason or "unknown"
    if text.startswith("turn "):
        return text.split(": ", 1)[1]
    return "repeated id" if text.startswith("its id came before") else "malformed"


def _manifest(
    settings: GenerateSettings, counts: Counts, totals: _Totals, sums: list[tuple[int, str]], files: list[Path]
) -> dict[str, Any]:
    run = read_run(settings.work_folder / "run.json")
    return {
        "schema": 2,
        "format": settings.format,
        "columns": ["id", "conversations", "status", "finish_reasons", "filters"],
        "rows": {"input": counts.input, "ok": counts.ok, "rejected": counts.rejected, "failed": counts.failed},
        "set_aside_reasons": dict(sorted(totals.reasons.items())),
        "turns": totals.turns,
        "prompt_tokens": totals.prompt_tokens,
        "output_tokens": totals.output_tokens,
        "finish_reasons": dict(sorted(totals.finish_reasons.items())),
        "filters": dict(sorted(totals.filters.items())),
        "fingerprint": run["fingerprint"],
        "fingerprint_changes": run["changes"],
        "files": [
            {"name": path.name, "rows": rows, "sha256": digest}
            for path, (rows, digest) in zip(files, sums, strict=True)
        ],
    }
