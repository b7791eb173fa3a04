"""The Ray Data stage on a local Ray: the rows of ``forebay generate``, and nothing asked for twice after a kill.

Ray is no part of the test environment: the tests run where ``ray`` is installed beside forebay, or in the environment
that FOREBAY_RAY_PYTHON names, and are skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workload_processes import ROOT, NullServer, finished, forebay, write_conversations

_PYTHON = sys.executable if importlib.util.find_spec("ray") else os.environ.get("FOREBAY_RAY_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not _PYTHON, reason="ray is not installed; FOREBAY_RAY_PYTHON names no environment that has it"
)

_SCRIPT = """
import json, os, sys, threading, time
from pathlib import Path
import ray
from forebay.workload.generate.settings import GenerateSettings, Sampling
from forebay.workload.generate.ray import generate
source, folder, url, out, kill_after = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20,
         runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
settings = GenerateSettings(Path("-"), Path("-"), (url,), Sampling(max_tokens=8), concurrency=8)
lines = [{"line": line} for line in open(source, encoding="utf-8")]
rows = ray.data.from_items([json.loads(item["line"]) for item in lines])
if kill_after != "0":
    def watch():
        while sum(p.stat().st_size for p in Path(folder).glob("journal-*.log")) < int(kill_after):
            time.sleep(0.01)
        os._exit(7)
    threading.Thread(target=watch, daemon=True).start()
done = generate(rows, settings, folder=folder, actors=1, batch_rows=32).take_all()
with open(out, "w", encoding="utf-8") as handle:
    for row in done:
        handle.write(json.dumps(row) + chr(10))
"""


def _ray(source: Path, folder: Path, url: str, out: Path, kill_after: int = 0) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [_PYTHON, "-c", _SCRIPT, str(source), str(folder), url, str(out), str(kill_after)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 7), done.stderr[-3000:]
    return done.returncode


def _dialogues(rows: list[dict]) -> list[str]:  # type: ignore[type-arg]
    """Conversations without the columns that Parquet adds, in an order of their own."""
    kept = [[(m["role"], m["content"]) for m in row["conversations"]] for row in rows if row["status"] == "success"]
    return sorted(json.dumps(turns) for turns in kept)


def test_a_killed_ray_job_continues_and_ends_with_the_rows_of_generate(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write_conversations(source, 120)
    source.write_text(
        "".join(line for line in source.open(encoding="utf-8") if '"content": ""' not in line), encoding="utf-8"
    )
    server = NullServer("--token-s", "0.002")
    try:
        whole = tmp_path / "whole.jsonl"
        assert (
            finished(forebay("generate", str(source), "-o", str(whole), "-s", server.url, "--max-tokens", "8"))[0] == 0
        )
        asked_once = server.stats()["requests"]
        folder, out = tmp_path / "ray", tmp_path / "ray.jsonl"
        assert _ray(source, folder, server.url, out, kill_after=8000) == 7
        assert _ray(source, folder, server.url, out) == 0
        again = server.stats()["requests"] - asked_once
    finally:
        server.kill()
    expected = [json.loads(line) for line in whole.open(encoding="utf-8")]
    found = [json.loads(line) for line in out.open(encoding="utf-8")]
    assert _dialogues(found) == _dialogues(expected)
    assert len(found) == len(expected)
    assert asked_once <= again <= asked_once + 8  # only what was in flight at the kill was asked for again
