"""Does ``forebay generate``'s memory grow with the number of rows?
Resident bytes over one long run against the null server.

The slope is fitted over the rows finished after SQLite's page cache (64 MiB, bounded) has filled; what a run holds
before is its size.

    python -m benchmarks.generate_memory [--rows 700000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.modules import null_server


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _watched(command: list[str]) -> tuple[list[tuple[int, int]], float, list[int]]:
    """(rows finished, resident bytes) at each progress event; seconds in all; resident bytes in every second."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    samples: list[tuple[int, int]] = []
    every_second: list[int] = []

    def look() -> None:
        while process.poll() is None:
            try:
                every_second.append(_resident_bytes(process.pid))
            except OSError:
                return
            time.sleep(1)

    threading.Thread(target=look, daemon=True).start()
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "progress":
            samples.append((event["rows"], _resident_bytes(process.pid)))
    if process.wait() != 0:
        raise SystemExit(f"generate ended with exit code {process.returncode}")
    return samples, time.monotonic() - began, every_second


def main() -> None:
    """Run once and print sizes and slopes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=700_000)
    options = parser.parse_args()
    with null_server("--tokens", "8") as url:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            with rows.open("w") as out:
                out.writelines(f'{{"id": "r{n}", "prompt": "question {n}"}}\n' for n in range(options.rows))
            command = [sys.executable, "-m", "forebay.cli", "generate", str(rows), "-o", f"{folder}/out.jsonl"]
            samples, seconds, every_second = _watched([*command, "-s", url, "--max-tokens", "64", "--json"])
    late = [(done, held) for done, held in samples if done >= options.rows // 2]
    slope = float(np.polyfit(*zip(*late, strict=True), 1)[0]) if len(late) > 2 else None
    record: dict[str, Any] = {"schema": 1, "rows": options.rows, "seconds": round(seconds, 1)}
    record["bytes_a_row_second_half"] = slope
    record["resident_mib_at_rows"] = [
        (done, round(held / 2**20, 1)) for done, held in samples[:: len(samples) // 12 or 1]
    ]
    record["most_resident_mib"] = round(max(every_second) / 2**20, 1)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
