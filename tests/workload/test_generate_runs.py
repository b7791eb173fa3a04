"""Whole runs of the command: exit codes, reconciliation, formats, locks, fingerprints, servers that come and go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from workload_processes import NullServer, finished, forebay, write_conversations


def _rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _generate(rows: Path, output: Path, server: str, *more: str) -> tuple[int, str, str]:
    return finished(forebay("generate", str(rows), "-o", str(output), "-s", server, *more))


def _wait_for(path: Path, size: int) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size >= size):
        assert time.monotonic() < deadline, f"{path} never grew to {size} bytes"
        time.sleep(0.01)


def test_ok_rejected_and_failed_rows_add_up_and_failed_ones_are_tried_again(
    null_server: NullServer, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    write_conversations(rows, 120)
    code, out, _ = _generate(rows, tmp_path / "out.jsonl", null_server.url)
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    lines = len(rows.read_text(encoding="utf-8").splitlines())
    assert code == 0
    assert manifest["rows"] == {"input": lines, "ok": lines - 2, "rejected": 2, "failed": 0}
    assert f"{lines - 2} ok + 2 rejected + 0 failed = {lines} input rows" in out
    rejected = _read(tmp_path / "out.rejected.jsonl")
    assert [row["reason"] for row in rejected] == ["message 0 (user) is empty"] * 2


def test_output_is_what_specforge_reads(null_server: NullServer, tmp_path: Path) -> None:
    """Its training reads id and conversations; its validator wants a text id, status success, and alternating roles."""
    rows = tmp_path / "rows.jsonl"
    write_conversations(rows, 60)
    assert _generate(rows, tmp_path / "out.jsonl", null_server.url)[0] == 0
    for row in _read(tmp_path / "out.jsonl"):
        assert isinstance(row["id"], str)
        assert row["id"].strip()
        assert row["status"] == "success"
        turns = [message for message in row["conversations"] if message["role"] != "system"]
        assert [message["role"] for message in turns] == ["user", "assistant"] * (len(turns) // 2)
        assert all(message["content"].strip() for message in row["conversations"])
        assert "old answer" not in json.dumps(row)


def test_parquet_in_and_sharded_parquet_out_hold_the_rows_of_jsonl(null_server: NullServer, tmp_path: Path) -> None:
    plain = _rows(tmp_path / "rows.jsonl", [{"id": f"r{n}", "prompt": f"question {n}"} for n in range(25)])
    table = arrow.Table.from_pylist(_read(plain))
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert _generate(plain, tmp_path / "out.jsonl", null_server.url)[0] == 0
    shards = tmp_path / "shards"
    options = ["--format", "parquet", "--shard-rows", "10"]
    assert _generate(tmp_path / "rows.parquet", shards, null_server.url, *options)[0] == 0
    manifest = json.loads((shards / "manifest.json").read_text())
    assert [(file["name"], file["rows"]) for file in manifest["files"]] == [
        ("part-00000.parquet", 10),
        ("part-00001.parquet", 10),
        ("part-00002.parquet", 5),
    ]
    found = [row for file in manifest["files"] for row in parquet.read_table(shards / file["name"]).to_pylist()]
    expected = _read(tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == [row["id"] for row in expected]
    assert [row["conversations"][1]["content"] for row in found] == [
        row["conversations"][1]["content"] for row in expected
    ]


def test_a_hugging_face_folder_is_read_split_by_split(null_server: NullServer, tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        folder = tmp_path / "data" / split
        folder.mkdir(parents=True)
        table = arrow.Table.from_pylist([{"prompt": f"{split} {n}"} for n in range(count)])
        with arrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    code, _, err = _generate(tmp_path / "data", tmp_path / "out.jsonl", null_server.url)
    assert (code, "--split train" in err) == (2, True)
    assert _generate(tmp_path / "data", tmp_path / "out.jsonl", null_server.url, "--split", "test")[0] == 0
    assert [row["conversations"][0]["content"] for row in _read(tmp_path / "out.jsonl")] == ["test 0", "test 1"]


def test_another_model_or_sampling_is_refused_unless_asked_for(null_server: NullServer, tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    output = tmp_path / "out.jsonl"
    assert _generate(rows, output, null_server.url)[0] == 0
    assert _generate(rows, output, null_server.url, "--temperature", "0.5")[0] == 3  # even with nothing left to ask
    _rows(rows, [{"prompt": "a"}, {"prompt": "b"}])
    code, _, err = _generate(rows, output, null_server.url, "--temperature", "0.5")
    assert (code, "sampling.temperature was 0.0, is 0.5" in err, "--allow-change" in err) == (3, True, True)
    assert _generate(rows, output, null_server.url, "--temperature", "0.5", "--allow-change")[0] == 0
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["fingerprint_changes"] == [["sampling.temperature was 0.0, is 0.5"]]


def test_a_second_writer_is_refused_and_ctrl_c_drains(tmp_path: Path) -> None:
    server = NullServer("--token-s", "0.01")
    try:
        rows = _rows(tmp_path / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(400)])
        output = tmp_path / "out.jsonl"
        arguments = ["generate", str(rows), "-o", str(output), "-s", server.url, "--concurrency", "4"]
        first = forebay(*arguments)
        _wait_for(tmp_path / "out.jsonl.journal" / "journal.log", 500)
        code, _, err = finished(forebay(*arguments))
        assert (code, "is being written by pid" in err) == (3, True)
        first.send_signal(signal.SIGINT)
        code, out, err = finished(first)
        assert (code, "the same command continues" in out, "draining" in err) == (130, True, True)
        assert not output.exists()
        assert finished(forebay(*arguments[:-1], "64"))[0] == 0
        assert len(_read(output)) == 400
    finally:
        server.kill()


def test_a_refused_row_fails_alone_with_exit_code_9(tmp_path: Path, null_server: NullServer) -> None:
    rows = _rows(tmp_path / "rows.jsonl", [{"prompt": "good"}, {"prompt": "refuse me"}, {"prompt": "also good"}])
    code, out, _ = _generate(rows, tmp_path / "out.jsonl", null_server.url)
    assert code == 9
    assert "the same command tries failed rows again" in out
    assert len(_read(tmp_path / "out.jsonl")) == 2
    (failed,) = _read(tmp_path / "out.failed.jsonl")
    assert "HTTP 400" in failed["reason"]
    assert failed["input_row"] == 2


def test_two_servers_share_the_work_and_429_is_waited_out(tmp_path: Path) -> None:
    servers = [NullServer("--token-s", "0.002", "--queue", "6") for _ in range(2)]
    try:
        rows = _rows(tmp_path / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(300)])
        arguments = ["generate", str(rows), "-o", str(tmp_path / "o.jsonl"), "--json"]
        code, out, _ = finished(forebay(*arguments, "-s", servers[0].url, "-s", servers[1].url))
        events = [json.loads(line) for line in out.splitlines()]
        assert (code, events[-1]["event"], events[-1]["rows"]["ok"]) == (0, "finished", 300)
        progress = [event for event in events if event["event"] == "progress"]
        assert progress[-1]["errors"].get("rate_limited", 0) > 0
        assert all(server.stats()["requests"] > 30 for server in servers)
        assert all(server.stats()["most_in_work"] <= 6 for server in servers)
    finally:
        for server in servers:
            server.kill()


def test_a_server_that_dies_is_taken_out_and_put_back(tmp_path: Path) -> None:
    servers = [NullServer("--token-s", "0.004") for _ in range(2)]
    try:
        rows = _rows(tmp_path / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(400)])
        arguments = ["generate", str(rows), "-o", str(tmp_path / "o.jsonl"), "--json", "--concurrency", "4"]
        run = forebay(*arguments, "-s", servers[0].url, "-s", servers[1].url)
        journal = tmp_path / "o.jsonl.journal" / "journal.log"
        _wait_for(journal, 4000)
        servers[0].kill()
        _wait_for(journal, journal.stat().st_size + 4000)
        servers[0].restart()
        code, out, _ = finished(run)
        names = [
            (event["event"], event["server"]) for line in out.splitlines() if "server" in (event := json.loads(line))
        ]
        assert code == 0
        assert names.count(("server_down", servers[0].url)) == 1
        assert names.count(("server_up", servers[0].url)) == 2
        assert len(_read(tmp_path / "o.jsonl")) == 400
    finally:
        for server in servers:
            server.kill()


def test_no_server_at_all_is_exit_code_4(tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    code, _, err = _generate(rows, tmp_path / "o.jsonl", "http://127.0.0.1:9", "--server-wait", "0.3")
    assert code == 4
    assert "no server was ready for 0 s: http://127.0.0.1:9" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.jsonl", "-o", "o.jsonl", "-s", ":9"], "missing.jsonl does not exist"),
        (["x.json", "-o", "o.jsonl", "-s", ":9"], "cannot be streamed"),
        (["x.jsonl", "-o", "o.jsonl"], "no server is named"),
        (["x.jsonl", "-o", "o.jsonl", "-s", "no-run"], "neither an address nor a run"),
        (["x.jsonl", "-o", "o.jsonl", "-s", ":9", "--format", "parquet"], "does not fit --format parquet"),
        (["x.jsonl", "-o", "o.jsonl", "-s", ":9", "--extra-body", "[1]"], "not a JSON object"),
        (["x.jsonl", "-o", "o.jsonl", "-s", ":9", "--max-tokens", "0"], "at least 1 token"),
    ],
)
def test_mistakes_are_exit_code_2_in_one_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "x.json").write_text("[]")
    code, out, err = finished(forebay("generate", *arguments))
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def _index_memory_mib(rows: int, folder: Path) -> float:
    """Peak memory of a process that indexes and dispatches ``rows`` rows to nobody."""
    code = (
        "import resource,sys\nfrom pathlib import Path\n"
        "from forebay.workload.generate.index import build_index\n"
        "from forebay.workload.generate.journal import Record\n"
        "from forebay.workload.generate.rows import parse_row\n"
        "class S:\n"
        "    def rows(self):\n"
        f'        for n in range({rows}): yield b\'{{"prompt": "question %d with some words"}}\' % n\n'
        f"i = build_index(Path(sys.argv[1]), S(), parse_row, Path('/nowhere'))\n"
        f"for n in range(0, {rows}, 256):\n"
        "    for e in i.window(n, n + 256): i.add_turn(Record(e.key.hex(), 0, e='ok'), n, 9)\n"
        f"assert i.counts().ok == {rows}\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / f"i{rows}")], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    """A row costs a few bytes of page cache until SQLite's bound is reached,
    and never its key and text in Python objects.
    """
    small, large = (_index_memory_mib(rows, tmp_path) for rows in (10_000, 110_000))
    grown_bytes_a_row = (large - small) * 2**20 / 100_000
    assert grown_bytes_a_row < 400, (small, large)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.jsonl.gz", "cannot be read after 0 rows"),
        ("x.parquet", "cannot be read after 0 rows"),
        ("x.jsonl", "is the input"),
    ],
)
def test_damaged_inputs_and_an_output_that_is_the_input_are_refused_in_one_line(
    name: str, says: str, tmp_path: Path, null_server: NullServer
) -> None:
    rows = tmp_path / name
    rows.write_bytes(b'{"prompt": "a"}\n')
    code, out, err = _generate(rows, rows if name == "x.jsonl" else tmp_path / "o.jsonl", null_server.url)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert rows.read_bytes() == b'{"prompt": "a"}\n'


def test_files_that_no_run_wrote_are_not_written_over(tmp_path: Path, null_server: NullServer) -> None:
    rows = _rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    foreign = tmp_path / "out.jsonl"
    foreign.write_text("foreign")
    code, _, err = _generate(rows, foreign, null_server.url)
    assert (code, "exists already" in err) == (2, True)
    assert foreign.read_text() == "foreign"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_in_one_line_and_the_run_continues(tmp_path: Path, null_server: NullServer) -> None:
    rows = _rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    folder = tmp_path / "out.jsonl.journal"
    folder.mkdir()
    (folder / "run.json.tmp").symlink_to("/dev/full")  # the first thing a run writes there for good
    code, _, err = _generate(rows, tmp_path / "out.jsonl", null_server.url)
    assert (code, "the disk is full" in err, "Traceback" in err) == (4, True, False)
    (folder / "run.json.tmp").unlink()
    assert _generate(rows, tmp_path / "out.jsonl", null_server.url)[0] == 0
