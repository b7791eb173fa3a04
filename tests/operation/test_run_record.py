"""The run's folder: written whole, found again, never mistaken."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from forebay.errors import RefusedError, UsageError
from forebay.machine.local import LocalMachine
from forebay.machine.processes import ProcessId
from forebay.operation.status import overview
from forebay.operation.watch.stage_times import compare, slowest_first
from forebay.runs.earlier_runs import KEPT_IN_ALL, KEPT_PER_NAME, prune_runs
from forebay.runs.event_tail import EventTail
from forebay.runs.run_record import Run, RunRecord, StageTime, all_runs, create_run, open_run
from forebay.runs.start_times import earlier_start_times, note_start_times


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    return tmp_path


def record(name: str = "one", **fields: object) -> RunRecord:
    base: dict[str, object] = {
        "name": name, "server": "sglang", "model": "/m", "version": "0.5.23", "command": ["x"], "env": {},
        "host": "0.0.0.0",
        "port": 30000, "run_id": name, "created_at": 1.0,
    }  # fmt: skip
    return RunRecord(**{**base, **fields})  # type: ignore[arg-type]


def made(name: str = "one", **fields: object) -> Run:
    return create_run(record(name, **fields), replace=lambda _old: False)


def test_what_is_written_is_read_back() -> None:
    who = ProcessId(7, 1234, "boot")
    run = made(api_server=who, members=[who], stages=[StageTime("loading", 2.5, 10, 20, 1.0)])
    assert open_run("one").read() == run.read()
    assert run.read().api_server == who
    assert run.read().url == "http://127.0.0.1:30000"


def test_an_unknown_name_lists_those_there_are() -> None:
    made("alpha")
    with pytest.raises(UsageError, match="known: alpha"):
        open_run("beta")
    with pytest.raises(UsageError):
        open_run("../alpha")


def test_a_name_in_use_is_refused_and_an_ended_one_is_kept_aside() -> None:
    made("one", ready_after_s=5.0, started_by="ada@laptop")
    with pytest.raises(RefusedError, match=r"still there: started by ada@laptop at 1970.*launching"):
        create_run(record("one"), replace=lambda _old: False)
    create_run(record("one"), replace=lambda _old: True)
    assert [other.name for other in all_runs()] == ["one"]
    assert [other.name for other in all_runs(earlier=True)] == ["one.1", "one"]
    assert open_run("one.1").read().ready_after_s == 5.0


def test_a_thousand_starts_of_one_name_are_never_refused_and_leave_a_bounded_number_of_folders() -> None:
    for _ in range(1005):
        create_run(record("one"), replace=lambda _old: True)
        prune_runs("one", may_remove=lambda _folder: True)
    kept = [run.name for run in all_runs(earlier=True)]
    assert sorted(kept) == sorted(["one", *(f"one.{number}" for number in range(1005 - KEPT_PER_NAME, 1005))])


def test_ended_runs_of_other_names_are_bounded_too_and_what_still_runs_is_never_removed(home: Path) -> None:
    for number in range(KEPT_IN_ALL + 20):
        made(f"run-{number}")
        os.utime(home / "runs" / f"run-{number}" / "run.json", (number, number))
    removed = prune_runs("another", may_remove=lambda folder: folder.name != "run-0")
    assert removed == 20
    left = {run.name for run in all_runs()}
    assert len(left) == KEPT_IN_ALL
    assert "run-0" in left
    assert "run-1" not in left


def test_status_reads_one_record_per_name_and_not_those_kept_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(8):
        create_run(record("one", state="stopped"), replace=lambda _old: True)
    reads: list[str] = []
    real = Run.read
    monkeypatch.setattr(Run, "read", lambda run: (reads.append(run.name), real(run))[1])
    assert [row.name for row in overview(LocalMachine())] == ["one"]
    assert reads == ["one"]
    assert len(overview(LocalMachine(), earlier=True)) == 8


def test_of_two_creators_at_once_one_wins() -> None:
    refused: list[RefusedError] = []

    def create() -> None:
        try:
            create_run(record("one"), replace=lambda _old: False)
        except RefusedError as error:
            refused.append(error)

    creators = [threading.Thread(target=create) for _ in range(8)]
    for creator in creators:
        creator.start()
    for creator in creators:
        creator.join()
    assert len(refused) == 7


def test_a_record_of_schema_1_is_read_and_a_newer_one_is_refused_in_one_line(home: Path) -> None:
    run = made("one")
    path = run.folder / "run.json"
    old = json.loads(path.read_text())
    del old["api_server"]
    old |= {
        "schema": 1,
        "front": {"pid": 7, "start_ticks": 5, "boot_id": "b"},
        "member_names": {"7": "front python -m server", "8": "worker x"},
    }
    path.write_text(json.dumps(old))
    found = run.read()
    assert found.api_server == ProcessId(7, 5, "b")
    assert found.member_names == {"7": "api_server python -m server", "8": "worker x"}
    path.write_text(json.dumps({**old, "schema": 3}))
    with pytest.raises(UsageError, match="has schema 3, this forebay reads up to 2"):
        run.read()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"schema": 2}', '{"schema": 2, "name": 5}', "\xff", '{"schema": "2"}']
)
def test_a_damaged_record_is_one_line_that_names_the_file(text: str) -> None:
    run = made("one")
    (run.folder / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        run.read()


def test_only_the_owner_may_read_a_run() -> None:
    run = made("one")
    run.event("stage")
    assert run.folder.stat().st_mode & 0o077 == 0
    assert (run.folder / "run.json").stat().st_mode & 0o077 == 0
    assert run.events_path.stat().st_mode & 0o077 == 0


def test_two_writers_lose_nothing() -> None:
    run = made()

    def note(letter: str) -> None:
        for number in range(25):
            run.update(lambda now, text=f"{letter}{number}": now.shm_names.append(text))  # type: ignore[misc]

    writers = [threading.Thread(target=note, args=(letter,)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(run.read().shm_names) == 50


def test_events_are_seen_once_and_only_when_whole() -> None:
    run = made()
    tail = EventTail(run)
    run.event("stage", stage="loading")
    with run.events_path.open("ab") as half:
        half.write(b'{"event": "rea')
    assert [event["event"] for event in tail.new()] == ["stage"]
    with run.events_path.open("ab") as rest:
        rest.write(b'dy"}\n')
    assert [event["event"] for event in tail.new()] == ["ready"]
    assert tail.new() == []


def test_a_stage_much_slower_than_before_is_named() -> None:
    for n in range(3):
        note_start_times("sglang", "/m", {"loading": 3.0 + n})
    note_start_times("sglang", "/another", {"loading": 100.0})
    earlier = earlier_start_times("sglang", "/m")
    slow, fine = compare([StageTime("loading", 30.0), StageTime("host pool", 99.0)], earlier)
    assert slow.slower_than_before == 4.0
    assert fine.slower_than_before is None
    assert compare([StageTime("loading", 8.5)], earlier)[0].slower_than_before is None


def test_the_file_of_start_times_stays_small_and_a_torn_line_is_passed_over(home: Path) -> None:
    for n in range(900):
        note_start_times("sglang", "/m", {"loading": float(n)})
    with (home / "start_times.jsonl").open("a") as file:
        file.write('{"server": "sgl')
    assert len((home / "start_times.jsonl").read_text().splitlines()) <= 401
    assert earlier_start_times("sglang", "/m")[-1] == {"loading": 899.0}


def test_stages_are_shown_slowest_first_and_a_repeated_one_once() -> None:
    stages = [StageTime("loading", 1.0, 5), StageTime("warming up", 4.0), StageTime("loading", 2.0, 7)]
    first, second = slowest_first(stages)
    assert (first.name, second.name, second.seconds, second.read_bytes) == ("warming up", "loading", 3.0, 12)
