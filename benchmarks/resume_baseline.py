"""What resuming by count costs: the rule of SpecForge's ``scripts/regenerate_train_data.py``,
against ``forebay generate``.

The rule (``--resume``): count the lines of the output, skip as many lines of the input, append. Rows are written in
completion order, through a file buffer that nobody flushes. Both sides run over the same null server and are killed
equally often at random moments.

    python -m benchmarks.resume_baseline [--rows 2000] [--kills 20] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

from benchmarks.lib.modules import module_command, module_env, null_server

_IN_FLIGHT = 16


async def resume_by_count(source: Path, output: Path, url: str) -> None:
    """One run of the rule, until the input is used up."""
    done = sum(1 for _ in output.open("rb")) if output.exists() else 0
    lines = source.read_text(encoding="utf-8").splitlines()[done:]
    waiting = iter(lines)
    async with aiohttp.ClientSession() as session:
        with output.open("a", encoding="utf-8") as out:

            async def worker() -> None:
                for line in waiting:
                    row = json.loads(line)
                    body = {"model": "null", "messages": row["conversations"], "max_tokens": len(row["id"]) * 2}
                    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                        answer = await response.json()
                    message = answer["choices"][0]["message"]
                    out.write(json.dumps({"id": row["id"], "conversations": [*row["conversations"], message]}) + "\n")

            await asyncio.gather(*[worker() for _ in range(_IN_FLIGHT)])


def killed_often(command: list[str], grows: Path, kills: int, whole_bytes: int, seed: int) -> int:
    """Run ``command`` to its end, killing it at random stretches of progress; returns how many kills hit it at work."""
    chosen, hits = random.Random(seed), 0

    def size() -> int:
        return grows.stat().st_size if grows.exists() else 0

    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=module_env())
        aim = size() + chosen.randint(0, int(1.2 * whole_bytes / kills))
        while size() < aim and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chosen.random() * 0.1)
        hits += process.poll() is None
        process.kill()
        process.wait()
    for _ in range(10):
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=module_env()).returncode == 0:
            break
    return hits


def reckon(rows: list[str], output: Path) -> dict[str, int]:
    """Rows lost and doubled by id, and lines that are no JSON."""
    seen: Counter[str] = Counter()
    unreadable = 0
    for line in output.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            seen[json.loads(line)["id"]] += 1
        except (ValueError, KeyError):
            unreadable += 1
    return {
        "lines": sum(seen.values()) + unreadable,
        "lost": sum(not seen[row] for row in rows),
        "doubled": sum(count - 1 for count in seen.values() if count > 1),
        "unreadable": unreadable,
    }


def main() -> None:
    """Run both sides and print what each lost and doubled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", nargs=3, metavar=("IN", "OUT", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(resume_by_count(Path(options.worker[0]), Path(options.worker[1]), options.worker[2]))
        return
    chosen = random.Random(options.seed)
    ids = [f"row{number}" + "x" * chosen.randint(0, 20) for number in range(options.rows)]
    with null_server("--tokens", "60", "--token-s", "0.001") as url:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = folder / "rows.jsonl"
            turns = [{"role": "user", "content": "a question"}]
            source.write_text(
                "".join(json.dumps({"id": i, "conversations": turns}) + "\n" for i in ids), encoding="utf-8"
            )
            counted, ours = folder / "counted.jsonl", folder / "ours.jsonl"
            worker = module_command("resume_baseline", "--worker", str(source), str(counted), url)
            hits = killed_often(worker, counted, options.kills, 280 * options.rows, options.seed)
            record = {"rows": options.rows, "resume_by_count": {"kills_at_work": hits, **reckon(ids, counted)}}
            generate = [sys.executable, "-m", "forebay.cli", "generate", str(source), "-o", str(ours), "-s", url]
            generate += ["--concurrency", str(_IN_FLIGHT)]
            journal = folder / "ours.jsonl.journal" / "journal.log"
            hits = killed_often(generate, journal, options.kills, 400 * options.rows, options.seed)
            record["forebay_generate"] = {"kills_at_work": hits, **reckon(ids, ours)}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
