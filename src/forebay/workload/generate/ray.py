"""``generate`` as a Ray Data stage, for more machines than one: the same rows, journal,
gates and lanes (needs ``forebay[ray]``).

    import ray
    from forebay.workload.generate.ray import generate
    rows = generate(ray.data.read_json("rows.jsonl"), settings, folder="/shared/run", actors=4)
    rows.filter(lambda row: row["status"] == "success").write_parquet("/shared/out")

Every actor writes a journal of its own in ``folder`` (on a file system that all machines share) and reads everybody's:
what an actor finished before it died is not asked for again, whoever gets its rows. Rows are known by the same keys as
in ``forebay generate``; as Ray gives rows no fixed order, of two contents under one id the one with the smaller hash is
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
from forebay.workload.generate.job import make_lane
from forebay.workload.generate.journal import Journal, history_digest, read_turns, scan
from forebay.workload.generate.output import output_id, output_row
from forebay.workload.generate.progress import Progress, Tally
from forebay.workload.generate.rows import Malformed, Row, key_of, parse_row
from forebay.workload.generate.run_fingerprint import check_fingerprint, fingerprint_of
from forebay.workload.generate.server_pool import ServerPool
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.generate.sources import RawRow

__all__ = ["GenerateStage", "generate", "identify"]

_ROW, _KEY, _GROUP, _WHY = "forebay_row", "forebay_key", "forebay_group", "forebay_why"
_locks: dict[Path, int] = {}


def generate(
    dataset: Any, settings: GenerateSettings, *, folder: str | Path, actors: int = 1, batch_rows: int = 256
) -> Any:
    """Generate every row of a Ray dataset; returns a lazy dataset of ``id, conversations, status, reason,
    finish_reasons``.

    ``status`` is ``success``, ``set_aside`` or ``failed``; every input row comes out once. The folder belongs to this
    process until it ends. Of ``settings`` the sources and outputs are not used: they are Ray's.

    Raises:
        RefusedError: another process generates into ``folder``.
    """
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    _hold(place)
    return identify(dataset, field_name=settings.field_name).map_batches(
        GenerateStage,
        fn_constructor_kwargs={"settings": settings, "folder": str(place)},
        batch_size=batch_rows,
        batch_format="pyarrow",
        concurrency=actors,
    )


def identify(dataset: Any, *, field_name: str | None = None) -> Any:
    """Give every row its key, which needs equal rows side by side: the one shuffle of the stage.

    Returns a dataset of the row as JSON, its key in hex, and why it is set aside (or None).
    """

    def bases(batch: Any) -> Any:
        rows = [_based(row, field_name) for row in batch.to_pylist()]
        return _table(rows, _ROW, _KEY, _GROUP, _WHY)

    def ordinals(group: Any) -> Any:
        return _table(list(_told_apart(group.to_pylist())), _ROW, _KEY, _WHY)

    based = dataset.map_batches(bases, batch_format="pyarrow")
    return based.groupby(_GROUP).map_groups(ordinals, batch_format="pyarrow")


class GenerateStage:
    """The stage's actor. Ray calls it with Arrow tables of ``identify``'s columns."""

    def __init__(self, settings: GenerateSettings, folder: str) -> None:
        self._settings = settings
        self._folder = Path(folder)
        name = f"journal-{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.log"
        self._journal = Journal(self._folder / name)
        self._journals = _FolderJournals(self._folder)
        self._loop = asyncio.new_event_loop()
        self._fleet = self._loop.run_until_complete(self._connect())

    def __call__(self, table: Any) -> Any:
        """Generate one batch; what the journals already hold is not asked for."""
        rows = [(row[_ROW].encode(), bytes.fromhex(row[_KEY]), row[_WHY]) for row in table.to_pylist()]
        index = Index(None)
        index.add_rows([(pos, key, None, why) for pos, (_, key, why) in enumerate(rows)])
        self._journals.refresh()
        for _, key, _ in rows:
            self._adopt(index, key)
        source = _Batch([raw for raw, _, _ in rows])
        progress = Progress(len(rows), as_json=False, stream=io.StringIO())
        self._loop.run_until_complete(self._generate(source, index, progress))
        places = index.places_between(0, len(rows))
        out = []
        for entry, (raw, _, _) in zip(index.window(0, len(rows)), rows, strict=True):
            turns = read_turns(self._journal.fd, entry.key, places.get(entry.pos, ()))
            row = self._parse(raw)
            done = entry.state == "ok" and isinstance(row, Row)
            written = output_row(output_id(entry.key, row), row, turns) if done and isinstance(row, Row) else {}
            out.append(
                {
                    "id": output_id(entry.key, row) if isinstance(row, Row) else row.row_id,
                    "conversations": written.get("conversations", []),
                    "status": "success" if done else entry.state,
                    "reason": entry.why,
                    "finish_reasons": written.get("finish_reasons", []),
                }
            )
        index.close()
        return _output_table(out)

    async def _connect(self) -> ServerPool:
        lanes = [make_lane(self._settings, url) for url in self._settings.servers]
        fleet = ServerPool(lanes, model=self._settings.model, reviver=None, wait_s=self._settings.server_wait_s)
        now = fingerprint_of(self._settings, await fleet.first_ready())
        with (self._folder / "fingerprint.lock").open("wb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            begun = any(path.stat().st_size for path in self._folder.glob("journal*.log"))
            check_fingerprint(self._folder / "run.json", now, begun=begun, allow_change=self._settings.allow_change)
        return fleet

    async def _generate(self, source: _Batch, index: Index, progress: Progress) -> None:
        await Dispatcher(self._settings, self._fleet, index, self._journal, progress, Tally()).run(source, self._parse)

    def _parse(self, raw: RawRow) -> Row | Malformed:
        return parse_row(raw, field_name=self._settings.field_name)

    def _adopt(self, index: Index, key: bytes) -> None:
        """Take what the folder's journals hold of a row into this actor's journal,
        which then holds every row it finishes.
        """
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
    """A batch as a source: only ``rows`` is asked of one."""

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
            "CREATE TABLE turns (key BLOB, journal INT, turn INT, at INT, length INT, before TEXT, after TEXT, ended "
            "INT, "
            "PRIMARY KEY (key, journal, turn)) WITHOUT ROWID"
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
        """The journal that is furthest with a row, and where its turns are:
        those that follow from the turns before them.
        """
        found = self._db.execute(
            "SELECT journal, turn, at, length, before, after, ended FROM turns WHERE key = ? ORDER BY journal, turn",
            (key,),
        ).fetchall()
        best: tuple[bool, int, int, list[tuple[int, int]]] = (False, 0, -1, [])
        for number, turns in groupby(found, key=lambda turn: turn[0]):
            places: list[tuple[int, int]] = []
            history, over = "", False
            for _, turn, at, length, before, after, ended in turns:
                if over or turn != len(places) or before != history:
                    break
                places.append((at, length))
                history, over = after, bool(ended)
            best = max(best, (over, len(places), number, places))
        return (self._journals[best[2]], best[3]) if best[3] else (None, [])


def _hold(folder: Path) -> None:
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


def _based(row: dict[str, Any], field_name: str | None) -> dict[str, Any]:
    """A row of the user's as JSON, with its base as the key and what it is grouped by: its id, else its base."""
    import msgspec

    raw = msgspec.json.encode({name: value for name, value in row.items() if value is not None}, enc_hook=str)
    parsed = parse_row(raw, field_name=field_name)
    malformed = isinstance(parsed, Malformed)
    grouped = f"id {parsed.row_id}" if parsed.row_id is not None and not malformed else parsed.base.hex()
    why = parsed.reason if isinstance(parsed, Malformed) else None
    return {_ROW: raw.decode(), _KEY: parsed.base.hex(), _GROUP: grouped, _WHY: why}


def _told_apart(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Within one group: equal rows get ordinals; other contents under the same id are set aside."""
    kept = min(row[_KEY] for row in rows)
    seen: dict[str, int] = {}
    for row in rows:
        base = row[_KEY]
        ordinal = seen.get(base, 0)
        seen[base] = ordinal + 1
        why = row[_WHY] or (None if base == kept else "its id came before with other content")
        yield {_ROW: row[_ROW], _KEY: key_of(bytes.fromhex(base), ordinal).hex(), _WHY: why}


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
