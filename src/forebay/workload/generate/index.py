"""The rows of the input and the turns of the journal: an SQLite file, rebuilt at every start.

It is derived state, so it needs no durability. Memory is bounded by SQLite's page cache. Not thread-safe; the job is
its only user.

A turn of the journal counts only when every turn before it counts and it was generated after exactly those answers
(``journal.history_digest``). So a journal with damaged, repeated or exchanged lines never gives a row the answers of
another history: the row is pending from its first missing turn on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from forebay.errors import UsageError
from forebay.workload.generate.journal import Record, history_digest, scan
from forebay.workload.generate.rows import Malformed, Row, key_of
from forebay.workload.generate.sources import RawRow, Rows

__all__ = ["Counts", "Index", "IndexEntry", "build_index", "input_changed"]

_CACHE_KIB = 64 * 1024
_BATCH = 1000
_SCHEMA = """
CREATE TABLE rows (pos INTEGER PRIMARY KEY, key BLOB NOT NULL, ordinal INT NOT NULL DEFAULT 0, id_hash BLOB,
                   reason TEXT);
CREATE TABLE turns (key BLOB, turn INT, at INT, length INT, before TEXT, after TEXT, state TEXT, reason TEXT,
                    PRIMARY KEY (key, turn)) WITHOUT ROWID;
CREATE TABLE failures (key BLOB PRIMARY KEY, reason TEXT) WITHOUT ROWID;
"""
# The first turn of each row that does not follow from the turns before it
_BROKEN = """
SELECT t.key, MIN(t.turn) FROM turns t LEFT JOIN turns p ON p.key = t.key AND p.turn = t.turn - 1
WHERE CASE WHEN t.turn = 0 THEN t.before != '' ELSE p.key IS NULL OR p.after != t.before OR p.state IS NOT NULL END
GROUP BY t.key
"""
_STATE = (
    "CASE WHEN r.reason IS NOT NULL THEN 'rejected' WHEN e.state IS NOT NULL THEN e.state "
    "WHEN f.key IS NOT NULL THEN 'failed' END"
)
_STATES = "FROM rows r LEFT JOIN turns e ON e.key = r.key AND e.state IS NOT NULL LEFT JOIN failures f ON f.key = r.key"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The state of one input row: None while pending, else ok, rejected or failed; ``turns`` counts its turns in the
    journal.
    """

    pos: int
    key: bytes
    ordinal: int
    state: str | None
    reason: str | None
    turns: int

    def check(self, row: Row | Malformed) -> None:
        """Compare the row that lies at this position now with the one that was indexed.

        Raises:
            UsageError: the input was changed while it was in use.
        """
        if key_of(row.digest, self.ordinal) != self.key:
            raise input_changed(f"row {self.pos + 1} is another one now")


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by state, counted from the index, not kept as running sums."""

    input: int
    ok: int
    rejected: int
    failed: int
    pending: int
    orphans: int  # keys in the journal that the input no longer has

    @property
    def reconciled(self) -> bool:
        """ok + rejected + failed = input, and nothing pending."""
        return self.pending == 0 and self.ok + self.rejected + self.failed == self.input


class Index:
    """An open index. Writes are buffered; every read sees them.

    Args:
        path: the file; an old one is replaced. None keeps a small index in memory.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.unlink(missing_ok=True)
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}", "temp_store=FILE"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA)
        self.broken_rows = 0
        self._input_rows = 0
        self._turns: list[tuple[bytes, int, int, int, str, str, str | None, str | None]] = []
        self._failures: list[tuple[bytes, str | None]] = []

    def close(self) -> None:
        """Close the file; it stays until the next build replaces it."""
        self._db.close()

    def add_turn(self, record: Record, at: int, length: int) -> None:
        """Note that the journal holds this turn at this offset; a later record of a turn replaces an earlier one."""
        after = history_digest(record.b, record.c)
        key = bytes.fromhex(record.k)
        self._turns.append((key, record.t, at, length, record.b, after, record.e, record.w))
        if len(self._turns) >= _BATCH:
            self._flush()

    def add_failure(self, key: bytes, reason: str | None) -> None:
        """Note that a row failed; this is forgotten at the next start."""
        self._failures.append((key, reason))
        if len(self._failures) >= _BATCH:
            self._flush()

    def drop_broken_turns(self) -> None:
        """Remove every turn that does not follow from the turns before it, and count the rows that had such turns."""
        self._flush()
        self._db.execute(f"CREATE TEMP TABLE broken AS {_BROKEN}")
        self.broken_rows = int(self._db.execute("SELECT COUNT(*) FROM broken").fetchone()[0])
        self._db.execute("CREATE TEMP TABLE cut (key BLOB PRIMARY KEY, turn INT) WITHOUT ROWID")
        self._db.execute("INSERT INTO cut SELECT * FROM broken")
        self._db.execute(
            "DELETE FROM turns WHERE key IN (SELECT key FROM cut) "
            "AND turn >= (SELECT turn FROM cut WHERE cut.key = turns.key)"
        )
        self._db.executescript("DROP TABLE broken; DROP TABLE cut")

    def window(self, start: int, stop: int) -> list[IndexEntry]:
        """The rows at positions ``start`` to ``stop`` (exclusive), in order."""
        self._flush()
        found = self._db.execute(
            f"SELECT r.pos, r.key, r.ordinal, {_STATE}, COALESCE(r.reason, e.reason, f.reason), "
            f"(SELECT COUNT(*) FROM turns t WHERE t.key = r.key) {_STATES} "
            "WHERE r.pos >= ? AND r.pos < ? ORDER BY r.pos",
            (start, stop),
        )
        return [IndexEntry(*row) for row in found]

    def turn_places(self, key: bytes) -> list[tuple[int, int]]:
        """Offset and length of each journalled turn of a row, in turn order."""
        self._flush()
        found = self._db.execute("SELECT at, length FROM turns WHERE key = ? ORDER BY turn", (key,))
        return [(at, length) for at, length in found]

    def places_between(self, start: int, stop: int) -> dict[int, list[tuple[int, int]]]:
        """The ``turn_places`` of every row at positions ``start`` to ``stop`` (exclusive), by position."""
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
            self._db.execute(f"SELECT {_STATE}, COUNT(*) {_STATES} GROUP BY 1").fetchall()
        )
        orphans = self._db.execute(
            "SELECT COUNT(DISTINCT key) FROM turns t WHERE NOT EXISTS (SELECT 1 FROM rows r WHERE r.key = t.key)"
        ).fetchone()[0]
        return Counts(
            sum(states.values()),
            states.get("ok", 0),
            states.get("rejected", 0),
            states.get("failed", 0),
            states.get(None, 0),
            orphans,
        )

    @property
    def input_rows(self) -> int:
        """How many rows the input has (with a limit: had, up to it)."""
        return self._input_rows

    def check_unique(self) -> int:
        """How many keys belong to more than one row; anything but 0 is a bug."""
        sql = "SELECT COUNT(*) FROM (SELECT 1 FROM rows GROUP BY key HAVING COUNT(*) > 1)"
        return int(self._db.execute(sql).fetchone()[0])

    def add_rows(self, rows: list[tuple[int, bytes, bytes | None, str | None]]) -> None:
        """Insert (position, digest, hash of the id, reason to reject it or None)."""
        self._input_rows += len(rows)
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO rows (pos, key, id_hash, reason) VALUES (?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def settle_identities(self) -> None:
        """Reject rows whose id came before with other content, then number equal rows."""
        self._db.execute("CREATE INDEX rows_by_key ON rows (key)")
        clashes = self._db.execute(
            "SELECT pos, key, id_hash FROM rows WHERE reason IS NULL AND id_hash IN (SELECT id_hash FROM rows "
            "WHERE reason IS NULL AND id_hash IS NOT NULL GROUP BY id_hash HAVING COUNT(DISTINCT key) > 1) "
            "ORDER BY id_hash, pos"
        )
        self._rewrite("UPDATE rows SET reason = ? WHERE pos = ?", _clash_reasons(clashes))
        equals = self._db.execute(
            "SELECT pos, key FROM rows WHERE key IN (SELECT key FROM rows GROUP BY key HAVING COUNT(*) > 1) "
            "ORDER BY key, pos"
        )
        self._rewrite("UPDATE rows SET key = ?, ordinal = ? WHERE pos = ?", _ordinal_keys(equals))

    def _rewrite(self, sql: str, changes: Iterator[tuple[object, ...]]) -> None:
        """Apply changes computed from a query over the same table: stored first, so that the query never sees them."""
        names = ", ".join("abc"[: sql.count("?")])
        self._db.execute(f"CREATE TEMP TABLE changes ({names})")
        self._db.executemany(f"INSERT INTO changes VALUES ({', '.join('?' * sql.count('?'))})", changes)
        stored = self._db.execute("SELECT * FROM changes")
        self._db.execute("BEGIN")
        self._db.executemany(sql, stored)
        self._db.execute("COMMIT")
        self._db.execute("DROP TABLE changes")

    def _flush(self) -> None:
        if not self._turns and not self._failures:
            return
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self._turns)
        self._db.executemany("INSERT OR REPLACE INTO failures VALUES (?, ?)", self._failures)
        self._db.execute("COMMIT")
        self._turns.clear()
        self._failures.clear()


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
        path: the index file; an old one is replaced.
        limit: read only the first so many rows.
        on_rows: called with the number of rows read so far.
    """
    index = Index(path)
    batch: list[tuple[int, bytes, bytes | None, str | None]] = []
    for pos, raw in enumerate(source.rows()):
        if pos == limit:
            break
        row = parse(raw)
        id_hash = key_of(b"id" + row.row_id.encode("utf-8", "surrogatepass"), 1) if row.row_id is not None else None
        batch.append((pos, row.digest, id_hash, row.reason if isinstance(row, Malformed) else None))
        if len(batch) >= _BATCH:
            index.add_rows(batch)
            batch.clear()
            on_rows(pos + 1)
    index.add_rows(batch)
    index.settle_identities()
    if journal.exists():
        for at, length, record in scan(journal):
            if record is not None and record.t >= 0:
                index.add_turn(record, at, length)
    index.drop_broken_turns()
    return index


def input_changed(what: str) -> UsageError:
    """The input is not the one that was indexed when this run began."""
    return UsageError(
        f"the input was changed while it was read: {what}",
        fix="run the same command again: finished rows are kept, whatever their place in the input",
    )


def _clash_reasons(found: Iterator[tuple[int, bytes, bytes]]) -> Iterator[tuple[str, int]]:
    first = (-1, b"", b"")
    for row in found:
        if row[2] != first[2]:
            first = row
        elif row[1] != first[1]:
            yield f"its id came before, in row {first[0] + 1}, with other content", row[0]


def _ordinal_keys(found: Iterator[tuple[int, bytes]]) -> Iterator[tuple[bytes, int, int]]:
    for digest, group in groupby(found, key=lambda row: row[1]):
        for ordinal, (pos, _) in enumerate(group):
            if ordinal:
                yield key_of(digest, ordinal), ordinal, pos
