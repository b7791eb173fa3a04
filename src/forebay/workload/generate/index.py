"""Which rows there are and which are done: an SQLite file, rebuilt at every start from the input and the journal.

It is derived state, so it needs no durability and is thrown away when it is in doubt. It keeps memory flat: per row it holds a key
on disk, and SQLite's page cache is bounded. Not thread-safe; the job is its only user.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from forebay.workload.generate.journal import scan
from forebay.workload.generate.rows import Malformed, Row, key_of
from forebay.workload.generate.sources import RawRow, Rows

__all__ = ["Counts", "Index", "IndexEntry", "build_index"]

_CACHE_KIB = 64 * 1024
_BATCH = 1000
_SCHEMA = """
CREATE TABLE rows (pos INTEGER PRIMARY KEY, key BLOB NOT NULL, id_hash BLOB, why TEXT);
CREATE TABLE turns (key BLOB, turn INT, at INT, length INT, PRIMARY KEY (key, turn)) WITHOUT ROWID;
CREATE TABLE ends (key BLOB PRIMARY KEY, state TEXT, why TEXT) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One input row's standing. ``state`` is None while pending, else ok, set_aside or failed."""

    pos: int
    key: bytes
    state: str | None
    why: str | None
    turns: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by standing, counted from the rows themselves (by key), not kept as running sums."""

    input: int
    ok: int
    set_aside: int
    failed: int
    pending: int
    orphans: int  # keys in the journal that the input no longer has

    @property
    def reconciled(self) -> bool:
        """ok + set aside + failed = input, and nothing pending."""
        return self.pending == 0 and self.ok + self.set_aside + self.failed == self.input


class Index:
    """An open index. Writes are buffered; every read sees them.

    Args:
        path: its file; one that is there is replaced. None keeps a small index in memory.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.unlink(missing_ok=True)
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}", "temp_store=FILE"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA)
        self._turns: list[tuple[bytes, int, int, int]] = []
        self._ends: list[tuple[bytes, str, str | None]] = []

    def close(self) -> None:
        """Close the file; it stays until the next build replaces it."""
        self._db.close()

    def note_turn(self, key: bytes, turn: int, at: int, length: int) -> None:
        """A turn is in the journal at this offset."""
        self._turns.append((key, turn, at, length))
        if len(self._turns) >= _BATCH:
            self._flush()

    def note_end(self, key: bytes, state: str, why: str | None) -> None:
        """A row has ended in this state."""
        self._ends.append((key, state, why))
        if len(self._ends) >= _BATCH:
            self._flush()

    def forget_failed(self) -> int:
        """Make failed rows pending again; returns how many."""
        self._flush()
        return self._db.execute("DELETE FROM ends WHERE state = 'failed'").rowcount

    def window(self, start: int, stop: int) -> list[IndexEntry]:
        """The standing of the rows at positions ``start`` to ``stop`` (exclusive), in order."""
        self._flush()
        found = self._db.execute(
            "SELECT r.pos, r.key, CASE WHEN r.why IS NOT NULL THEN 'set_aside' ELSE e.state END, "
            "COALESCE(r.why, e.why), (SELECT COUNT(*) FROM turns t WHERE t.key = r.key) "
            "FROM rows r LEFT JOIN ends e ON e.key = r.key WHERE r.pos >= ? AND r.pos < ? ORDER BY r.pos",
            (start, stop),
        )
        return [IndexEntry(*row) for row in found]

    def turn_places(self, key: bytes) -> list[tuple[int, int]]:
        """Offset and length of each journalled turn of a row, in turn order."""
        self._flush()
        found = self._db.execute("SELECT at, length FROM turns WHERE key = ? ORDER BY turn", (key,))
        return [(at, length) for at, length in found]

    def places_between(self, start: int, stop: int) -> dict[int, list[tuple[int, int]]]:
        """``turn_places`` of every row at positions ``start`` to ``stop`` (exclusive), by position."""
        self._flush()
        found = self._db.execute(
            "SELECT r.pos, t.at, t.length FROM rows r JOIN turns t ON t.key = r.key "
            "WHERE r.pos >= ? AND r.pos < ? ORDER BY r.pos, t.turn",
            (start, stop),
        )
        places: dict[int, list[tuple[int, int]]] = {}
        for pos, at, length in found:
            places.setdefault(pos, []).append((at, length))
        return places

    def counts(self) -> Counts:
        """Count every row by its key."""
        self._flush()
        states: dict[str | None, int] = dict(
            self._db.execute(
                "SELECT CASE WHEN r.why IS NOT NULL THEN 'set_aside' ELSE e.state END, COUNT(*) "
                "FROM rows r LEFT JOIN ends e ON e.key = r.key GROUP BY 1"
            ).fetchall()
        )
        orphans = self._db.execute(
            "SELECT COUNT(*) FROM (SELECT key FROM ends UNION SELECT key FROM turns) k "
            "WHERE NOT EXISTS (SELECT 1 FROM rows r WHERE r.key = k.key)"
        ).fetchone()[0]
        return Counts(
            sum(states.values()),
            states.get("ok", 0),
            states.get("set_aside", 0),
            states.get("failed", 0),
            states.get(None, 0),
            orphans,
        )

    def check_unique(self) -> int:
        """How many keys belong to more than one row; anything but 0 is our bug."""
        sql = "SELECT COUNT(*) FROM (SELECT 1 FROM rows GROUP BY key HAVING COUNT(*) > 1)"
        return int(self._db.execute(sql).fetchone()[0])

    def add_rows(self, rows: list[tuple[int, bytes, bytes | None, str | None]]) -> None:
        """Insert (position, base, id hash, reason to set aside)."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO rows VALUES (?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def settle_identities(self) -> None:
        """Set rows aside whose id came before with other content, then give equal rows their ordinals."""
        self._db.execute("CREATE INDEX rows_by_key ON rows (key)")
        clashes = self._db.execute(
            "SELECT pos, key, id_hash FROM rows WHERE why IS NULL AND id_hash IN (SELECT id_hash FROM rows "
            "WHERE why IS NULL AND id_hash IS NOT NULL GROUP BY id_hash HAVING COUNT(DISTINCT key) > 1) "
            "ORDER BY id_hash, pos"
        )
        self._rewrite("UPDATE rows SET why = ? WHERE pos = ?", _clash_reasons(clashes))
        equals = self._db.execute(
            "SELECT pos, key FROM rows WHERE key IN (SELECT key FROM rows GROUP BY key HAVING COUNT(*) > 1) "
            "ORDER BY key, pos"
        )
        self._rewrite("UPDATE rows SET key = ? WHERE pos = ?", _ordinal_keys(equals))

    def _rewrite(self, sql: str, changes: Iterator[tuple[object, int]]) -> None:
        """Apply changes computed from a query over the same table: spooled first, so that the query never sees them."""
        self._db.execute("CREATE TEMP TABLE spool (value, pos INT)")
        self._db.executemany("INSERT INTO spool VALUES (?, ?)", changes)
        spooled = self._db.execute("SELECT value, pos FROM spool")
        self._db.execute("BEGIN")
        self._db.executemany(sql, spooled)
        self._db.execute("COMMIT")
        self._db.execute("DROP TABLE spool")

    def _flush(self) -> None:
        if not self._turns and not self._ends:
            return
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?)", self._turns)
        self._db.executemany("INSERT OR REPLACE INTO ends VALUES (?, ?, ?)", self._ends)
        self._db.execute("COMMIT")
        self._turns.clear()
        self._ends.clear()


def build_index(
    path: Path,
    source: Rows,
    parse: Callable[[RawRow], Row | Malformed],
    journal: Path,
    *,
    limit: int | None = None,
    on_rows: Callable[[int], None] = lambda _count: None,
) -> Index:
    """Read the whole input and the whole journal into a new index. Memory: one batch of rows.

    Args:
        path: where the index goes; an old one is replaced.
        parse: ``parse_row`` with the run's field name bound.
        limit: take only the first so many rows.
        on_rows: told the number of rows read so far, now and then.
    """
    index = Index(path)
    batch: list[tuple[int, bytes, bytes | None, str | None]] = []
    for pos, raw in enumerate(source.rows()):
        if pos == limit:
            break
        row = parse(raw)
        id_hash = key_of(b"id" + row.row_id.encode("utf-8", "surrogatepass"), 1) if row.row_id is not None else None
        batch.append((pos, row.base, id_hash, row.reason if isinstance(row, Malformed) else None))
        if len(batch) >= _BATCH:
            index.add_rows(batch)
            batch.clear()
            on_rows(pos + 1)
    index.add_rows(batch)
    index.settle_identities()
    if journal.exists():
        for at, length, record in scan(journal):
            if record is None:
                continue
            key = bytes.fromhex(record.k)
            if record.t >= 0:
                index.note_turn(key, record.t, at, length)
            if record.e is not None:
                index.note_end(key, record.e, record.w)
    return index


def _clash_reasons(found: Iterator[tuple[int, bytes, bytes]]) -> Iterator[tuple[str, int]]:
    first = (-1, b"", b"")
    for row in found:
        if row[2] != first[2]:
            first = row
        elif row[1] != first[1]:
            yield f"its id came before, in row {first[0] + 1}, with other content", row[0]


def _ordinal_keys(found: Iterator[tuple[int, bytes]]) -> Iterator[tuple[bytes, int]]:
    for base, group in groupby(found, key=lambda row: row[1]):
        for ordinal, (pos, _) in enumerate(group):
            if ordinal:
                yield key_of(base, ordinal), pos
