"""What ``forebay bench`` costs itself, beside ``vllm bench serve`` and ``aiperf``: many streams of one null server,
in turn.

The null server paces its tokens, so that a client that keeps up sees the same throughput as any other; one that does
not is slower. Others run from environments of their own, ``$FOREBAY_CACHE/peers/vllm`` and ``.../aiperf``; left out
with a note where there is none. Wall time and throughput are the server's own: from its first request to its last
answer. CPU seconds are of the whole client.

    python -m benchmarks.bench_peers --tokenizer FOLDER [--streams 500] [--requests 1500] [--rounds 2]
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

_TOKENS = 32
_VLLM = """import argparse
from vllm.benchmarks.serve import add_cli_args, main
p = argparse.ArgumentParser()
add_cli_args(p)
main(p.parse_args())"""


def _commands(url: str, tokenizer: str, streams: int, requests: int, folder: Path) -> dict[str, list[str]]:
    """Name to command."""
    ours = [sys.executable, "-m", "forebay.cli", "bench", url, "--workload", "fixed", "--words", "--input-tokens", "32"]
    ours += ["--output-tokens", str(_TOKENS), "--concurrency", str(streams), "--sessions", str(requests)]
    commands = {"forebay bench": ours}
    peers = cache_dir() / "peers"
    vllm, aiperf = peers / "vllm" / "bin" / "python", peers / "aiperf" / "bin" / "aiperf"
    if vllm.is_file():
        commands["vllm bench serve"] = [
            *(
                str(vllm),
                "-c",
                _VLLM,
                "--backend",
                "openai-chat",
                "--endpoint",
                "/v1/chat/completions",
                "--base-url",
                url,
            ),
            *("--model", "null", "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "32"),
            *("--random-output-len", str(_TOKENS), "--num-prompts", str(requests), "--max-concurrency", str(streams)),
            *("--ignore-eos", "--disable-tqdm", "--ready-check-timeout-sec", "0"),
        ]
    if aiperf.is_file():
        commands["aiperf"] = [
            *(str(aiperf), "profile", "--model", "null", "--url", url, "--endpoint-type", "chat", "--streaming"),
            *("--concurrency", str(streams), "--request-count", str(requests), "--tokenizer", "local/tokenizer"),
            *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", str(_TOKENS), "--ui", "none"),
            *("--use-server-token-count", "--artifact-dir", str(folder / "aiperf")),
        ]
    for name, path in (("vllm bench serve", vllm), ("aiperf", aiperf)):
        if name not in commands:
            print(f"note: {name} left out: nothing at {path}", file=sys.stderr)
    return commands


def _hub_of_one(tokenizer: str, home: Path) -> None:
    """A Hugging Face cache that holds the tokenizer as ``local/tokenizer``: aiperf takes no folder,
    and there is no network.
    """
    repository = home / "hub" / "models--local--tokenizer"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for path in Path(tokenizer).absolute().iterdir():
        (snapshot / path.name).symlink_to(path)


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with null_server("--tokens", str(_TOKENS), "--token-s", str(options.token_s)) as url:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as folder:
            _hub_of_one(options.tokenizer, Path(folder) / "hf")
            client = _commands(url, options.tokenizer, options.streams, options.requests, Path(folder))[name]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
            environment["HF_HOME"] = str(Path(folder) / "hf")
            done = subprocess.run(
                client, capture_output=True, text=True, timeout=540, env=environment, check=False, cwd=folder
            )
        with urlopen(f"{url}/null/stats") as answer:
            stats = json.load(answer)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0 or stats["requests"] < options.requests:
        said = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
        return {"failed": " ".join(said[-3:])[:300], "requests": stats["requests"]}
    seconds = stats["last_s"] - stats["first_s"]
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    rate = stats["output_tokens"] / seconds
    return {"tokens_per_s": rate, "most_streams": stats["most_in_work"], "cpu_s": cpu_s, "requests": stats["requests"]}


def main() -> None:
    """Measure every client in turn, ``--rounds`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="A model folder: vllm counts tokens itself.")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--token-s", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name in _commands("", "", 1, 1, Path()):
            results.setdefault(name, []).append(_measure(name, options))
            print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    paced = options.streams / options.token_s
    print(json.dumps({"schema": 1, "paced_tokens_per_s": paced, "cores": os.cpu_count(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
