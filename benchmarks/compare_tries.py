"""How often ``forebay bench --compare`` is right: equal servers must compare as equal,
one made 5 % slower must be told apart.

Every try is a whole comparison of two fresh null servers, with prompts of its own; the verdict counted is the one on
output tokens a second. A verdict of *no difference* on equal servers is right, and so is *B is worse* on the slower
one.

    python -m benchmarks.compare_tries [--tries 10] [--rounds 8] [--slower 0.05]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.lib.modules import null_server


def one_try(token_s: float, slower: float, rounds: int) -> dict[str, float | bool]:
    """Compare a server with one that takes ``slower`` more time a token."""
    a_s, b_s = str(token_s), str(token_s * (1 + slower))
    with null_server("--first-s", a_s, "--token-s", a_s) as a, null_server("--first-s", b_s, "--token-s", b_s) as b:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "record.json"
            command = [sys.executable, "-m", "forebay.cli", "bench", "--compare", a, b]
            command += ["--workload", "fixed", "--words", "--input-tokens", "64", "--output-tokens", "32"]
            command += ["--concurrency", "16", "--sessions", "16", "--rounds", str(rounds), "--json", str(record)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            ratio: dict[str, float | bool] = json.loads(record.read_text())["ratios_b_over_a"]["output"]
    return ratio


def main() -> None:
    """Run the tries and print how many were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--slower", type=float, default=0.05)
    parser.add_argument("--token-s", type=float, default=0.01)
    options = parser.parse_args()
    equal, slow = [], []
    for number in range(options.tries):
        equal.append(one_try(options.token_s, 0.0, options.rounds))
        slow.append(one_try(options.token_s, options.slower, options.rounds))
        print(f"try {number + 1}: equal {equal[-1]}\n       slower {slow[-1]}", file=sys.stderr, flush=True)
    record = {
        "schema": 1,
        "tries": options.tries,
        "rounds": options.rounds,
        "equal_said_no_difference": sum(not ratio["differs"] for ratio in equal),
        "slower_was_told_apart": sum(bool(ratio["differs"]) and ratio["value"] < 1 for ratio in slow),
        "equal": equal,
        "slower": slow,
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
