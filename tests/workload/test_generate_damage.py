"""Damaged journals: the output is the undamaged run's, or the row is asked again;
no answer comes under another prompt.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import pytest
from workload_processes import NullServer, finished, forebay

from forebay.errors import DeadError, RefusedError, UsageError
from forebay.workload.generate.index import build_index
from forebay.workload.generate.job import JobOutcome, run_job
from forebay.workload.generate.journal import (
    Journal,
    Record,
    decode_line,
    encode_line,
    history_digest,
    read_turns,
    scan,
)
from forebay.workload.generate.progress import Progress
from forebay.workload.generate.rows import Row, parse_row
from forebay.workload.generate.settings import GenerateSettings, Sampling
from forebay.workload.generate.sources import open_source

CASES = 1000
FULL_RUNS = 200  # of the cases above: continued against a server until the output is written


def _conversation(prompts: list[str]) -> str:
    """One input row with these user messages and old answers between them."""
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "an old answer"}] for text in prompts]
    return json.dumps({"messages": [message for turn in turns for message in turn]}) + "\n"


def _write_rows(path: Path) -> None:
    """14 conversations of 1 to 4 turns; two of them are equal."""
    rows = [[f"{turn}: question {number}?" for turn in range(1 + number % 4)] for number in range(14)]
    rows[9] = rows[6]
    path.write_text("".join(map(_conversation, rows)), encoding="utf-8")


def _settings(folder: Path, url: str) -> GenerateSettings:
    return GenerateSettings(
        folder / "rows.jsonl", folder / "out.jsonl", (url,), Sampling(max_tokens=4), concurrency=8, server_wait_s=20
    )


def _run(settings: GenerateSettings) -> JobOutcome:
    return run_job(settings, lambda total: Progress(total, as_json=False, stream=io.StringIO()))


def _output(folder: Path) -> list[str]:
    return (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def finished_run(tmp_path: Path, null_server: NullServer) -> tuple[Path, str]:
    """A folder with the rows, the output and the journal of a finished run, and the server's address."""
    _write_rows(tmp_path / "rows.jsonl")
    assert _run(_settings(tmp_path, null_server.url)).counts.ok == 14
    return tmp_path, null_server.url


def damaged(journal: bytes, chosen: random.Random) -> bytes:
    """The journal with one bit flipped, cut at one byte, or two of its lines doubled or exchanged."""
    how = chosen.choice(["flip", "cut", "double", "swap", "move"])
    if how == "flip":
        at = chosen.randrange(len(journal))
        return journal[:at] + bytes([journal[at] ^ 1 << chosen.randrange(8)]) + journal[at + 1 :]
    if how == "cut":
        return journal[: chosen.randrange(len(journal))]
    lines = journal.splitlines(keepends=True)
    a, b = chosen.randrange(len(lines)), chosen.randrange(len(lines))
    if how == "double":
        lines[b:b] = [lines[a]]
    elif how == "swap":
        lines[a], lines[b] = lines[b], lines[a]
    else:
        lines[b] = lines[a]  # one line is lost, another is there twice
    return b"".join(lines)


def test_any_damage_leaves_each_row_as_it_was_or_asks_it_again(finished_run: tuple[Path, str]) -> None:
    folder, url = finished_run
    settings = _settings(folder, url)
    place = settings.work_folder / "journal.log"
    whole, expected = place.read_bytes(), _output(folder)
    turns = {(record.k, record.t): record for _, _, record in scan(place) if record}
    chosen = random.Random(15)
    for case in range(CASES):
        place.write_bytes(damaged(whole, chosen))
        journal = Journal(place)
        index = build_index(settings.work_folder / "i.sqlite", open_source(settings.source), parse_row, place)
        for entry, raw in zip(index.window(0, 99), open_source(settings.source).rows(), strict=True):
            row = parse_row(raw)
            assert isinstance(row, Row)
            found = read_turns(journal.fd, entry.key, index.turn_places(entry.key))
            assert found == [turns[entry.key.hex(), number] for number in range(len(found))], case
            assert entry.state == ("ok" if len(found) == len(row.prompts) else None), case
        index.close()
        journal.close()
        if case % (CASES // FULL_RUNS) == 0:
            assert _run(settings).interrupted is False
            assert _output(folder) == expected, case


def test_a_damaged_line_in_the_middle_of_a_row_costs_only_the_turns_from_there(finished_run: tuple[Path, str]) -> None:
    folder, url = finished_run
    place = folder / "out.jsonl.journal" / "journal.log"
    lines, expected = place.read_bytes().splitlines(keepends=True), _output(folder)
    records = [decode_line(line[:-1]) for line in lines]
    at = next(n for n, record in enumerate(records) if record and record.t == 1 and record.e is None)
    lines[at] = lines[at].replace(b'"c":"', b'"c":"x')
    place.write_bytes(b"".join(lines))
    key = records[at].k  # type: ignore[union-attr]
    lost = sum(record.k == key for record in records if record) - 1
    again = forebay(
        "generate", str(folder / "rows.jsonl"), "-o", str(folder / "out.jsonl"), "-s", url, "--max-tokens", "4"
    )
    code, out, err = finished(again)
    assert code == 0, err
    assert "1 damaged lines skipped" in err
    assert "1 rows had turns that do not follow" in err
    assert f"{lost} turns generated by this command" in out
    assert _output(folder) == expected


def _journal_of(folder: Path, *records: Record) -> list[Record]:
    """The turns that count of one row of three turns whose journal holds these records."""
    (folder / "rows.jsonl").write_text(_conversation(["q"] * 3))
    place = folder / "journal.log"
    place.write_bytes(b"".join(encode_line(record) for record in records))
    index = build_index(folder / "index.sqlite", open_source(folder / "rows.jsonl"), parse_row, place)
    journal = Journal(place)
    try:
        (entry,) = index.window(0, 1)
        turns = read_turns(journal.fd, entry.key, index.turn_places(entry.key))
        assert (entry.state == "ok") == (len(turns) == 3)
        return turns
    finally:
        journal.close()
        index.close()


def test_a_turn_generated_after_other_answers_does_not_count(tmp_path: Path) -> None:
    """A server that samples answers differently when a lost turn is asked again:
    the old third turn fits the old second one only.
    """
    row = parse_row(_conversation(["q"] * 3).encode())
    key = row.digest.hex()
    empty = ""
    one = history_digest(empty, "one")
    first = Record(key, 0, empty, "one")
    second, third = Record(key, 1, one, "two"), Record(key, 2, history_digest(one, "two"), "three", e="ok")
    again, last = Record(key, 1, one, "other"), Record(key, 2, history_digest(one, "other"), "end", e="ok")
    assert _journal_of(tmp_path, first, second, third) == [first, second, third]
    assert _journal_of(tmp_path, first, third) == [first]
    assert _journal_of(tmp_path, first, third, again) == [first, again]
    assert _journal_of(tmp_path, first, third, again, last) == [first, again, last]
    assert _journal_of(tmp_path, first, last, again, third) == [first, again]
    assert _journal_of(tmp_path, second, third) == []
    failed = Record(key, e="failed", w="why")
    assert _journal_of(tmp_path, failed, first, second, third, failed) == [first, second, third]


def test_a_place_that_holds_another_turn_is_never_taken_for_the_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.log")
    places = [journal.append(Record(bytes([row] * 16).hex(), 0, "", f"answer {row}")) for row in range(2)]
    assert read_turns(journal.fd, bytes(16), [places[0]])[0].c == "answer 0"
    with pytest.raises(DeadError, match="no longer turn 1 of its row"):
        read_turns(journal.fd, bytes(16), [places[1]])
    journal.close()


@pytest.mark.parametrize("how", ["flipped", "emptied", "removed"])
def test_damaged_or_missing_settings_of_a_run_are_refused_unless_allowed(
    finished_run: tuple[Path, str], how: str
) -> None:
    folder, url = finished_run
    stored = folder / "out.jsonl.journal" / "run.json"
    if how == "removed":
        stored.unlink()
    else:
        stored.write_bytes(
            b"" if how == "emptied" else stored.read_bytes().replace(b'"max_tokens": 4', b'"max_tokens": 5')
        )
    settings = _settings(folder, url)
    with pytest.raises(RefusedError, match="missing" if how == "removed" else "damaged"):
        _run(settings)
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write('{"prompt": "one more"}\n')
    allowed = GenerateSettings(
        settings.source, settings.output, (url,), settings.sampling, concurrency=8, allow_change=True
    )
    assert _run(allowed).counts.ok == 15
    manifest = json.loads((folder / "out.manifest.json").read_text())
    assert ("missing" if how == "removed" else "damaged") in manifest["fingerprint_changes"][0][0]
    _run(settings)  # the accepted change is stored: the next run needs no option


def test_every_bit_of_the_stored_settings_is_covered_by_its_checksum(finished_run: tuple[Path, str]) -> None:
    folder, url = finished_run
    stored = folder / "out.jsonl.journal" / "run.json"
    whole = json.loads(stored.read_bytes())
    raw, chosen = stored.read_bytes(), random.Random(3)
    for _ in range(300):
        at = chosen.randrange(len(raw))
        stored.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << chosen.randrange(8)]) + raw[at + 1 :])
        refused = None
        try:
            _run(_settings(folder, url))
        except RefusedError as error:
            refused = str(error)
        if refused is not None:
            assert "damaged" in refused
        else:
            left = json.loads(stored.read_bytes())
            assert (left["fingerprint"], left["changes"]) == (whole["fingerprint"], whole["changes"])


def test_an_input_that_changes_while_it_is_read_ends_in_one_line(tmp_path: Path, null_server: NullServer) -> None:
    """Positions are known from the first reading of the input;
    another row at a known position must not get its answers.
    """
    settings = _settings(tmp_path, null_server.url)
    _write_rows(settings.source)
    lines = settings.source.read_text().splitlines(keepends=True)
    for changed in (lines[1:] + lines[:1], lines[:-1]):
        settings.source.write_text("".join(lines))
        shutil.rmtree(settings.work_folder, ignore_errors=True)

        def change(
            total: int, changed: list[str] = changed
        ) -> Progress:  # called between the first and the second reading
            settings.source.write_text("".join(changed))
            return Progress(total, as_json=False, stream=io.StringIO())

        with pytest.raises(UsageError, match="the input was changed while it was read"):
            run_job(settings, change)
        assert not settings.output.exists()
    assert _run(settings).counts.ok == len(lines) - 1
