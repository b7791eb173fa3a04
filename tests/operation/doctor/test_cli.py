"""`forebay doctor` as a command."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

from forebay.operation.doctor import diagnose, read_file

DATA = Path(__file__).parents[2] / "data"
FAILED = DATA / "captures" / "sglang" / "fail_port_in_use.log"


def run(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.cli", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={"FOREBAY_HOME": str(home), "PATH": "/usr/bin:/bin"},
        check=False,
    )


def test_json_has_the_contracts_keys(tmp_path: Path) -> None:
    done = run("--json", str(FAILED), home=tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert {"schema", "server", "came_up", "cause", "others", "evidence", "ruled_out", "fix"} <= set(answer)
    assert (answer["server"], answer["came_up"], answer["cause"]) == ("sglang", False, "port_in_use")
    first = answer["evidence"][0]
    assert (first["source"], first["line"]) == (str(FAILED), 60)
    assert "31010" in first["text"]


def test_text_names_cause_line_and_fix(tmp_path: Path) -> None:
    done = run(str(FAILED), home=tmp_path)
    assert "cause: port_in_use" in done.stdout
    assert f"{FAILED}:60" in done.stdout
    assert "--port 31011" in done.stdout


def test_a_file_that_is_not_there_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = run(str(tmp_path / "nothing.log"), home=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no such file" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_gzip_and_endless_lines_are_read(tmp_path: Path) -> None:
    packed = tmp_path / "server.log.gz"
    packed.write_bytes(gzip.compress(b"x" * 3_000_000 + b"\n" + FAILED.read_bytes()))
    answer = diagnose([read_file(packed)])
    assert answer.cause == "port_in_use"
    assert answer.evidence[0].line == 61


def test_memory_stays_bounded_on_a_storm_of_lines(tmp_path: Path) -> None:
    storm = tmp_path / "storm.log"
    lines = b"".join(
        b"[2026-01-01 00:00:01 TP0] RuntimeError: failed request %d with number %x\n" % (i, i) for i in range(60_000)
    )
    storm.write_bytes(FAILED.read_bytes() + lines)
    log = read_file(storm)
    assert len(log.kept) < 15_000
    assert diagnose([log]).cause == "port_in_use"
