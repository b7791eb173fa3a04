"""``generate`` as a Ray Data stage, for several machines, with the same keys, journal and filters (needs
``forebay[ray]``).

    import ray
    from forebay.workload.generate.ray import generate
    rows = generate(ray.data.read_json("rows.jsonl"), settings, folder="/shared/run", actors=4)
    rows.filter(lambda row: row["status"] == "success").write_parquet("/shared/out")

Each actor writes its own journal in ``folder`` (on a file system that all machines share) and reads all others: turns
that an actor finished before it died are not asked for again, whichever actor gets its rows. Rows have the same keys as
in ``forebay generate``. Ray gives rows no fixed order: of two contents with one id the one with the smaller hash is
kept, not the first.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import platform
import sqlite3
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from forebay.errors import RefusedError, UsageError
from forebay.workload.generate.dispatch import Dispatcher
from forebay.workload.generate.index import Index
from forebay.workload.generate.job import make_endpoint
from forebay.workload.generate.journal import Journal, history_digest, read_turns, scan
from forebay.workload.generate.output import output_id, output_row
from forebay.workload.generate.progress import Progress, Tally
from forebay.workload.generate.rows import Malformed, Row, key_of, parse_row
from forebay.workload.generate.run_fingerprint import check_fingerprint, fingerprint_of
from forebay.workload.generate.server_pool import ServerPool
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.generate.sources import RawRow

__all__ = ["GenerateStage", "generate", "identify"]

_ROW, _KEY, _GROUP, _REASON = "forebay_row", "forebay_key", "forebay_group", "forebay_reason"
_locks: dict[Path, int] = {}


def generate(
    dataset: Any, settings: GenerateSettings, *, folder: str | Path, actors: int = 1, batch_rows: int = 256
) -> Any:
    """Generate every row of a Ray dataset; returns a lazy dataset of ``id, conversations, status, reason,
    finish_reasons``.

    ``status`` is ``success``, ``rejected`` or ``failed``; every input row is returned once. The folder is locked until
    this process ends. ``source`` and ``output`` of ``settings`` are not used.

    Raises:
        RefusedError: another process generates into ``folder``.
    """
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    _lock_folder(place)
    return identify(dataset, field_name=settings.field_name).map_batches(
        GenerateStage,
        fn_constructor_kwargs={"settings": settings, "folder": str(place)},
        batch_size=batch_rows,
        batch_format="pyarrow",
        concurrency=actors,
    )


def identify(dataset: Any, *, field_name: str | None = None) -> Any:
    """Give every row its key. Equal rows must be numbered, so this groups the data set: the only shuffle of the stage.

    Returns a dataset of the row as JSON, its key in hex, and the reason why it is rejected (or None).
    """

    def with_digest(batch: Any) -> Any:
        rows = [_keyed(row, field_name) for row in batch.to_pylist()]
        return _table(rows, _ROW, _KEY, _GROUP, _REASON)

    def ordinals(group: Any) -> Any:
        return _table(list(_number_equal_rows(group.to_pylist())), _ROW, _KEY, _REASON)

    based = dataset.map_batches(with_digest, batch_format="pyarrow")
    return based.groupby(_GROUP).map_groups(ordinals, batch_format="pyarrow")


class GenerateStage:
    """The stage's actor. Ray calls it with Arrow tables with the columns of ``identify``."""

    def __init__(self, settings: GenerateSettings, folder: str) -> None:
        self._settings = settings
        self._folder = Path(folder)
        name = f"journal-{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.log"
        self._journal = Journal(self._folder / name)
        self._journals = _FolderJournals(self._folder)
        self._loop = asyncio.new_event_loop()
        self._pool = self._loop.run_until_complete(self._connect())

    def __call__(self, table: Any) -> Any:
        """Generate one batch; turns that the folder's journals hold are not asked for."""
        rows = [(row[_ROW].encode(), bytes.fromhex(row[_KEY]), row[_REASON]) for row in table.to_pylist()]
        index = Index(None)
        index.add_rows([(pos, key, None, reason) for pos, (_, key, reason) in enumerate(rows)])
        self._journals.refresh()
        for _, key, _ in rows:
            self._take_finished_turns(index, key)
        source = _Batch([raw for raw, _, _ in rows])
        progress = Progress(len(rows), as_json=False, stream=io.StringIO())
        self._loop.run_until_complete(self._generate(source, index, progress))
        out = self._output_rows(index, rows)
        index.close()
        return _output_table(out)

    def _output_rows(self, index: Index, rows: list[tuple[bytes, bytes, str | None]]) -> list[dict[str, Any]]:
        places = index.places_between(0, len(rows))
        out = []
        for entry, (raw, _, _) in zip(index.window(0, len(rows)), rows, strict=True):
            turns = read_turns(self._journal.fd, entry.key, places.get(entry.pos, ()))
            row = self._parse(raw)
            row_id = output_id(entry.key, row) if isinstance(row, Row) else row.row_id
            done = entry.state == "ok" and isinstance(row, Row)
            written = output_row(output_id(entry.key, row), row, turns) if done and isinstance(row, Row) else {}
            out.append(
                {
                    "id": row_id,
                    "conversations": written.get("conversations", []),
                    "status": "success" if done else entry.state,
                    "reason": entry.reason,
                    "finish_reasons": written.get("finish_reasons", []),
                }
            )
        return out

    async def _connect(self) -> ServerPool:
        servers = [make_endpoint(self._settings, url) for url in self._settings.servers]
        pool = ServerPool(servers, model=self._settings.model, restarter=None, wait_s=self._settings.server_wait_s)
        now = fingerprint_of(self._settings, await pool.first_ready())
        with (self._folder / "fingerprint.lock").open("wb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            begun = any(path.stat().st_size for path in self._folder.glob("journal*.log"))
            check_fingerprint(self._folder / "run.json", now, begun=begun, allow_change=self._settings.allow_change)
        return pool

    async def _generate(self, source: _Batch, index: Index, progress: Progress) -> None:
        await Dispatcher(self._settings, self._pool, index, self._journal, progress, Tally()).run(source, self._parse)

    def _parse(self, raw: RawRow) -> Row | Malformed:
        return parse_row(raw, field_name=self._settings.field_name)

    def _take_finished_turns(self, index: Index, key: bytes) -> None:
        """Copy the finished turns of a row into this actor's journal, which then holds every row that it finishes."""
        journal, places = self._journals.best(key)
        if journal is None:
            return
        own = journal.path == self._journal.path
        for record, (at, length) in zip(read_turns(journal.fd, key, places), places, strict=True):
            if not own:
                at, length = self._journal.append(record)
            index.add_turn(record, at, length)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch as an input."""

    raws: list[bytes]

    def rows(self) -> Iterator[RawRow]:
        return iter(self.raws)


@dataclass(slots=True)
class _ReadJournal:
    """A journal of the folder, read up to ``end``."""

    number: int
    path: Path
    fd: int
    end: int = 0


class _FolderJournals:
    """The turns in all journals of the folder, by row and journal; kept on disk, not in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journals: list[_ReadJournal] = []
        self._db = sqlite3.connect(
            "", isolation_level=None, check_same_thread=False
        )  # a temporary file; Ray calls from threads in turn
        self._db.execute(
            "CREATE TABLE turns (key BLOB, journal INT, turn INT, at INT, length INT, before TEXT, after TEXT, "
            "ended INT, PRIMARY KEY (key, journal, turn)) WITHOUT ROWID"
        )

    def refresh(self) -> None:
        """Read what was written since the last time."""
        known = {journal.path for journal in self._journals}
        for path in sorted(set(self._folder.glob("journal*.log")) - known):
            self._journals.append(_ReadJournal(len(self._journals), path, os.open(path, os.O_RDONLY)))
        for journal in self._journals:
            self._db.execute("BEGIN")
            for at, length, record in scan(journal.path, journal.end):
                journal.end = at + length + 1
                if record is not None and record.t >= 0:
                    after = history_digest(record.b, record.c)
                    turn = (record.t, at, length, record.b, after, record.e is not None)
                    row = (bytes.fromhex(record.k), journal.number, *turn)
                    self._db.execute("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._db.execute("COMMIT")

    def best(self, key: bytes) -> tuple[_ReadJournal | None, list[tuple[int, int]]]:
        """The journal with most turns of a row, and their places; only turns that follow from the turns before them
        count.
        """
        found = self._db.execute(
            "SELECT journal, turn, at, length, before, after, ended FROM turns WHERE key = ? ORDER BY journal, turn",
            (key,),
        ).fetchall()
        best: tuple[bool, int, int, list[tuple[int, int]]] = (False, 0, -1, [])
        for number, turns in groupby(found, key=lambda turn: turn[0]):
            places: list[tuple[int, int]] = []
            history, complete = "", False
            for _, turn, at, length, before, after, ended in turns:
                if complete or turn != len(places) or before != history:
                    break
                places.append((at, length))
                history, complete = after, bool(ended)
            best = max(best, (complete, len(places), number, places))
        return (self._journals[best[2]], best[3]) if best[3] else (None, [])


def _lock_folder(folder: Path) -> None:
    if folder in _locks:
        return
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RefusedError(
            f"{folder} is being written by another process", fix="wait for it, or choose another folder"
        ) from None
    _locks[folder] = fd


def _keyed(row: dict[str, Any], field_name: str | None) -> dict[str, Any]:
    """An input row as JSON, with its digest as the key; rows are grouped by their id, else by their digest."""
    import msgspec

    raw = msgspec.json.encode({name: value for name, value in row.items() if value is not None}, enc_hook=str)
    parsed = parse_row(raw, field_name=field_name)
    malformed = isinstance(parsed, Malformed)
    grouped = f"id {parsed.row_id}" if parsed.row_id is not None and not malformed else parsed.digest.hex()
    reason = parsed.reason if isinstance(parsed, Malformed) else None
    return {_ROW: raw.decode(), _KEY: parsed.digest.hex(), _GROUP: grouped, _REASON: reason}


def _number_equal_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of one group: equal rows are numbered, other contents with the same id are rejected."""
    kept = min(row[_KEY] for row in rows)
    seen: dict[str, int] = {}
    for row in rows:
        digest = row[_KEY]
        ordinal = seen.get(digest, 0)
        seen[digest] = ordinal + 1
        reason = row[_REASON] or (None if digest == kept else "its id came before with other content")
        yield {_ROW: row[_ROW], _KEY: key_of(bytes.fromhex(digest), ordinal).hex(), _REASON: reason}


def _table(rows: list[dict[str, Any]], *names: str) -> Any:
    arrow = _arrow()
    return arrow.table({name: arrow.array([row[name] for row in rows], arrow.string()) for name in names})


def _output_table(rows: list[dict[str, Any]]) -> Any:
    arrow = _arrow()
    text = arrow.string()
    message = arrow.struct([("role", text), ("content", text), ("reasoning_content", text)])
    types = {
        "id": text,
        "conversations": arrow.list_(message),
        "status": text,
        "reason": text,
        "finish_reasons": arrow.list_(text),
    }
    return arrow.Table.from_pylist(rows, schema=arrow.schema(list(types.items())))


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError("the Ray stage needs ray and pyarrow", fix="pip install 'forebay[ray]'") from error
    return pyarrow
