"""Install a real SGLang or vLLM for a machine without a GPU, into an environment of its own.

    python3.11 scripts/peers/install.py sglang          # -> $FOREBAY_CACHE/peers/sglang
    python3.11 scripts/peers/install.py vllm            # -> $FOREBAY_CACHE/peers/vllm

Never into the project's environment: both pin their own torch and transformers. Running it again is cheap: the
environment carries ``recipe.json`` (the recipe's hash and every installed version), written last, so that an
interrupted installation is started afresh and a finished one is left alone. One installer at a time per server (a lock
file beside the folder); a second one waits and then finds the work done.

Exit codes: 0 installed (or already there), 3 the packages cannot be had (no registry, a version that is gone), 1
otherwise.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNAVAILABLE = ("No matching distribution found", "Could not find a version", "Temporary failure in name resolution")

# name -> pip invocations after the environment exists. torchvision of the default index does not load beside a CPU
# torch, and sglang's and xgrammar's own requirement lists pull CUDA packages: hence --no-deps, and the uninstall for
# vLLM.
STEPS: dict[str, list[list[str]]] = {
    "sglang": [
        ["install", "-r", str(HERE / "sglang" / "requirements.txt")],
        ["install", "--no-deps", "torchvision==0.28.0", "xgrammar==0.2.7", "sglang==0.5.23"],
    ],
    "vllm": [
        ["install", "-r", str(HERE / "vllm" / "requirements.txt")],
        ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
    ],
}


def cache_root() -> Path:
    """``$FOREBAY_CACHE/peers``, with forebay's own default."""
    return Path(os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay") / "peers"


def recipe_hash(name: str) -> str:
    """What shapes the environment: the steps and every file of the recipe."""
    digest = hashlib.sha256(json.dumps([step[:1] + step[1:] for step in STEPS[name]]).replace(str(HERE), "").encode())
    for path in sorted((HERE / name).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def already_there(root: Path, wanted: str) -> bool:
    try:
        return bool(json.loads((root / "recipe.json").read_text())["recipe"] == wanted)
    except (OSError, ValueError, KeyError):
        return False


def say(name: str, text: str) -> None:
    print(f"peers/{name}: {text}", flush=True)


def find_python() -> str:
    """Python 3.11: the interpreter both recipes were tried with."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        sys.exit("peers: needs python3.11 (both recipes were tried with it), and it is not on the PATH")
    return found


def pip(name: str, root: Path, arguments: list[str], log: Path) -> None:
    """One pip step: its output in ``log``, one line of progress every ten seconds."""
    command = [str(root / "bin" / "python"), "-m", "pip", arguments[0], "--disable-pip-version-check", *arguments[1:]]
    started = time.monotonic()
    with log.open("ab") as sink:
        child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        while True:
            try:
                code = child.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                last = log.read_text(errors="replace").strip().rsplit("\n", 1)[-1].strip()
                say(name, f"{time.monotonic() - started:4.0f} s  {last[:100]}")
    if code != 0:
        tail = log.read_text(errors="replace").strip().splitlines()[-5:]
        print("\n".join(tail), file=sys.stderr)
        say(name, f"failed: pip {arguments[0]} ended with {code}; the whole output is in {log}")
        sys.exit(3 if any(mark in "\n".join(tail) for mark in UNAVAILABLE) else 1)


def versions(root: Path) -> dict[str, str]:
    listing = subprocess.run(
        [str(root / "bin" / "python"), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {entry["name"]: entry["version"] for entry in json.loads(listing)}


def install(name: str, root: Path) -> None:
    wanted = recipe_hash(name)
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(name, "another installation is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if already_there(root, wanted):
            say(name, f"already installed in {root}")
            return
        started = time.monotonic()
        shutil.rmtree(root, ignore_errors=True)
        say(name, f"creating {root} (about 100 s and 3.5 GB)")
        subprocess.run([find_python(), "-m", "venv", str(root)], check=True)
        for step in STEPS[name]:
            pip(name, root, step, root / "install.log")
        if (HERE / name / "launch.py").is_file():  # what the CPU start needs travels with the environment
            shutil.copytree(HERE / name, root / "cpu", ignore=shutil.ignore_patterns("__pycache__", "requirements.txt"))
        record = {"schema": 1, "recipe": wanted, "server": name, "versions": versions(root)}
        temporary = root / "recipe.json.tmp"
        temporary.write_text(json.dumps(record, indent=1, sort_keys=True))
        temporary.rename(root / "recipe.json")
        say(name, f"installed in {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=sorted(STEPS))
    parser.add_argument("--into", type=Path, help="the environment's folder; default $FOREBAY_CACHE/peers/SERVER")
    arguments = parser.parse_args()
    install(arguments.server, arguments.into or cache_root() / arguments.server)


if __name__ == "__main__":
    main()
