"""The run's folder: written whole, found again, never mistaken."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from forebay.errors import RefusedError, UsageError
from forebay.machine.processes import ProcessId
from forebay.operation.records.event_tail import EventTail
from forebay.operation.records.run_record import Run, RunRecord, StageTime, all_runs, create_run, open_run
from forebay.operation.watch.stage_times import compare, slowest_first


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    return tmp_path


def record(name: str = "one", **fields: object) -> RunRecord:
    base: dict[str, object] = {
        "name": name, "server": "sglang", "model": "/m", "version": "0.5.23", "command": ["x"], "env": {}, "host": "0.0.0.0",
        "port": 30000, "run_id": name, "created_at": 1.0,
    }  # fmt: skip
    return RunRecord(**{**base, **fields})  # type: ignore[arg-type]


def made(name: str = "one", **fields: object) -> Run:
    run = create_run(name, replace=lambda _old: False)
    run.write(record(name, **fields))
    return run


def test_what_is_written_is_read_back() -> None:
    who = ProcessId(7, 1234, "boot")
    run = made(front=who, members=[who], stages=[StageTime("loading", 2.5, 10, 20, 1.0)])
    assert open_run("one").read() == run.read()
    assert run.read().front == who
    assert run.read().url == "http://127.0.0.1:30000"


def test_an_unknown_name_lists_those_there_are() -> None:
    made("alpha")
    with pytest.raises(UsageError, match="known: alpha"):
        open_run("beta")
    with pytest.raises(UsageError):
        open_run("../alpha")


def test_a_name_in_use_is_refused_and_an_ended_one_is_kept_aside() -> None:
    made("one", ready_after_s=5.0)
    with pytest.raises(RefusedError, match="still there"):
        create_run("one", replace=lambda _old: False)
    run = create_run("one", replace=lambda _old: True)
    run.write(record("one"))
    assert sorted(other.name for other in all_runs()) == ["one", "one.1"]


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
    earlier = [record(str(n), ready_after_s=9.0, stages=[StageTime("loading", 3.0 + n)]) for n in range(3)]
    slow, fine = compare([StageTime("loading", 30.0), StageTime("host pool", 99.0)], earlier)
    assert slow.slower_than_before == 4.0
    assert fine.slower_than_before is None
    assert compare([StageTime("loading", 8.5)], earlier)[0].slower_than_before is None


def test_stages_are_shown_slowest_first_and_a_repeated_one_once() -> None:
    stages = [StageTime("loading", 1.0, 5), StageTime("warming up", 4.0), StageTime("loading", 2.0, 7)]
    first, second = slowest_first(stages)
    assert (first.name, second.name, second.seconds, second.read_bytes) == ("warming up", "loading", 3.0, 12)
