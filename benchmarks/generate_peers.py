"""``forebay generate`` against other clients, over the same null server, interleaved: rows a second,
and rows a CPU second.

Others: the ``openai`` async client in a plain loop (in this environment), ``bespokelabs-curator`` and ``data-designer``
(each from an environment of its own, ``$FOREBAY_CACHE/peers/curator`` and ``.../datadesigner``; left out with a note
where it is not there). Wall time counts from the first request to the last answer, as the server saw them: no side pays
for its imports. CPU seconds are of the whole client process.

The frameworks get fewer rows (``--framework-rows``): they would take minutes, and their start is not in their wall
time.

    python -m benchmarks.generate_peers [--rows 20000] [--framework-rows 600] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.lib.modules import null_server
from forebay.paths import cache_dir

_IN_FLIGHT = 64

_OPENAI = """
import asyncio, json, os, sys
from openai import AsyncOpenAI
source, out, url = sys.argv[1:]
async def main():
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=5)
    rows = iter([json.loads(line) for line in open(source)])
    with open(out, "w") as handle:
        async def worker():
            for row in rows:
                answer = await client.chat.completions.create(model="null", max_tokens=64, temperature=0,
                    messages=[{"role": "user", "content": row["prompt"]}])
                handle.write(json.dumps({"id": row["id"], "answer": answer.choices[0].message.content}) + chr(10))
        await asyncio.gather(*[worker() for _ in range(int(os.environ["IN_FLIGHT"]))])
asyncio.run(main())
"""

_CURATOR = """
import json, os, sys, tempfile
os.environ.update(OPENAI_API_KEY="none", CURATOR_VIEWER="0", TELEMETRY_ENABLED="0", HF_HUB_OFFLINE="1")
from bespokelabs import curator
source, out, url = sys.argv[1:]
class Ask(curator.LLM):
    def prompt(self, row):
        return row["prompt"]
    def parse(self, row, response):
        return {"id": row["id"], "answer": response}
llm = Ask(model_name="openai/null", backend="litellm", generation_params={"max_tokens": 64, "temperature": 0},
    backend_params={"base_url": url + "/v1", "api_key": "none",
        "max_concurrent_requests": int(os.environ["IN_FLIGHT"]), "max_requests_per_minute": 10**7,
                    "max_tokens_per_minute": 10**9, "require_all_responses": True})
rows = [json.loads(line) for line in open(source)]
done = llm(rows, working_dir=tempfile.mkdtemp())
done.dataset.to_json(out)
"""

_DESIGNER = """
import json, os, sys, tempfile
import pandas
import data_designer.config as dd
from data_designer.interface import DataDesigner
source, out, url = sys.argv[1:]
rows = pandas.DataFrame([json.loads(line) for line in open(source)])
designer = DataDesigner(artifact_path=tempfile.mkdtemp(),
    model_providers=[dd.ModelProvider(name="null", endpoint=url + "/v1", api_key="none")])
model = dd.ModelConfig(alias="null", model="null", provider="null", skip_health_check=True,
    inference_parameters=dd.ChatCompletionInferenceParams(
        max_tokens=64, temperature=0.0, max_parallel_requests=int(os.environ["IN_FLIGHT"])))
builder = dd.DataDesignerConfigBuilder(model_configs=[model])
builder.with_seed_dataset(dd.DataFrameSeedSource(df=rows))
builder.add_column(dd.LLMTextColumnConfig(name="answer", prompt="{{ prompt }}", model_alias="null"))
done = designer.create(builder, num_records=len(rows))
done.load_dataset().to_json(out, orient="records", lines=True)
"""


def _clients() -> dict[str, list[str]]:
    """Name to the command's head; the input, the output and the server follow."""
    peers = cache_dir() / "peers"
    clients = {
        "forebay generate": [sys.executable, "-c", "GENERATE"],
        "openai async client": [sys.executable, "-c", _OPENAI],
    }
    for name, folder, script in (
        ("bespokelabs-curator", "curator", _CURATOR),
        ("data-designer", "datadesigner", _DESIGNER),
    ):
        python = peers / folder / "bin" / "python"
        if python.is_file():
            clients[name] = [str(python), "-c", script]
        else:
            print(f"note: {name} left out: no environment at {python}", file=sys.stderr)
    return clients


def _run(head: list[str], source: Path, out: Path, url: str, log: Path) -> float:
    """CPU seconds of one client."""
    command = [*head, str(source), str(out), url]
    if head[-1] == "GENERATE":
        command = [
            sys.executable,
            "-m",
            "forebay.cli",
            "generate",
            str(source),
            "-o",
            str(out),
            "-s",
            url,
            "--max-tokens",
            "64",
        ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("wb") as handle:
        subprocess.run(
            command,
            stdout=handle,
            stderr=handle,
            check=True,
            timeout=540,
            env={**os.environ, "NO_COLOR": "1", "IN_FLIGHT": str(_IN_FLIGHT)},
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _measure(head: list[str], source: Path, rows: int, folder: Path) -> dict[str, Any]:
    out, log = folder / "out.jsonl", folder / "log"
    try:
        with null_server("--tokens", "8") as url:
            cpu_s = _run(head, source, out, url, log)
            with urlopen(f"{url}/null/stats") as answer:
                stats = json.load(answer)
    except subprocess.SubprocessError as error:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        return {"failed": f"{type(error).__name__}: {' '.join(tail)[:300]}"}
    with out.open("rb") as lines:
        written = sum(1 for _ in lines)
    wall_s = stats["last_s"] - stats["first_s"]
    return {
        "rows_per_s": rows / wall_s,
        "rows_per_cpu_s": rows / cpu_s,
        "rows": rows,
        "written": written,
        "requests": stats["requests"],
    }


def main() -> None:
    """Measure every client ``--rounds`` times, in turn, and print what each reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--framework-rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name, head in _clients().items():
            count = {"forebay generate": options.rows, "openai async client": max(options.rows // 10, 1)}
            rows = count.get(name, options.framework_rows)
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "rows.jsonl"
                source.write_text(
                    "".join(json.dumps({"id": f"r{n}", "prompt": f"question {n}"}) + "\n" for n in range(rows))
                )
                results.setdefault(name, []).append(_measure(head, source, rows, Path(folder)))
            print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    print(json.dumps({"schema": 1, "cores": os.cpu_count(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
