"""The journal: whatever happens to its bytes, what it reads back is what was wholly written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.workload.generate.journal import Journal, Record, encode_line, read_turns, scan

_RECORDS = st.builds(
    Record,
    k=st.binary(min_size=16, max_size=16).map(bytes.hex),
    t=st.integers(-1, 5),
    c=st.text(max_size=30),
    r=st.none() | st.text(max_size=10),
    e=st.sampled_from([None, "ok", "failed"]),
)


def _read(path: Path) -> list[Record | None]:
    return [record for _, _, record in scan(path)]


@given(st.lists(_RECORDS, min_size=1, max_size=4), _RECORDS)
@settings(max_examples=30, deadline=None)
def test_a_journal_cut_at_any_byte_reads_as_the_records_before_the_cut(records: list[Record], later: Record) -> None:
    lines = [encode_line(record) for record in records]
    whole = b"".join(lines)
    ends = [sum(map(len, lines[: n + 1])) for n in range(len(lines))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.log"
        for cut in range(len(whole) + 1):
            path.write_bytes(whole[:cut])
            kept = sum(end <= cut for end in ends)
            assert _read(path) == records[:kept]
            journal = Journal(path)
            assert journal.repair.torn_bytes == cut - ([0, *ends][kept])
            journal.append(later)
            journal.close()
            assert _read(path) == [*records[:kept], later]


@given(st.lists(_RECORDS, min_size=2, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_costs_its_line_and_no_other(records: list[Record], data: st.DataObject) -> None:
    lines = [encode_line(record) for record in records]
    at = data.draw(st.integers(0, len(lines) - 2))
    byte = data.draw(st.integers(0, len(lines[at]) - 2))
    flipped = bytearray(lines[at])
    flipped[byte] ^= data.draw(st.integers(1, 255).filter(lambda mask: flipped[byte] ^ mask != 10))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.log"
        path.write_bytes(b"".join([*lines[:at], bytes(flipped), *lines[at + 1 :]]))
        read = _read(path)
        assert [*read[:at], *read[at + 1 :]] == [*records[:at], *records[at + 1 :]]
        assert read[at] is None or read[at] == records[at]  # the checksum's own digits may change case
        assert Journal(path).repair.damaged_lines == (read[at] is None)


def test_append_says_where_the_record_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.log")
    records = [Record(bytes(16).hex(), number, "", "текст" * number) for number in range(5)]
    assert read_turns(journal.fd, bytes(16), [journal.append(record) for record in records]) == records
    assert journal.sync() == journal.end == (tmp_path / "journal.log").stat().st_size
    journal.close()
