"""The built wheel, installed into an empty environment on a machine without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_process import ServerProcess
from tiny_models import make_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes its own folders beside the sources."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@dataclass(frozen=True)
class Installed:
    """An environment of its own with the wheel and nothing of this one."""

    folder: Path
    home: Path

    def run(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """The installed command; PATH holds the environment only, so there is no compiler to be found."""
        environment = {
            "PATH": str(self.folder / "bin"),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(self.folder / "bin" / "forebay"), *words]
        return subprocess.run(
            command, env=environment, cwd=self.home, capture_output=True, text=True, timeout=timeout_s, check=False
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("env") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0 and any(text in done.stderr for text in ("No matching distribution", "NewConnectionError")):
        pytest.skip(f"no package registry here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return Installed(folder, tmp_path_factory.mktemp("home"))


def test_the_wheel_holds_every_file_of_the_package_and_the_license(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "forebay").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc")
    }
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = archive.read(next(name for name in held if name.endswith(".dist-info/METADATA"))).decode()
    assert expected - held == set()
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"forebay"}
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert "License-Expression: Apache-2.0" in metadata


def test_the_operator_needs_neither_torch_nor_a_compiler(installed: Installed) -> None:
    listed = subprocess.run(
        [str(installed.folder / "bin" / "python"), "-m", "pip", "list", "--format=json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = {package["name"] for package in json.loads(listed.stdout)}
    assert not names & {"torch", "transformers", "fastapi", "starlette"}
    for words in (["--help"], ["--version"], ["status"], ["completion", "zsh"]):
        done = installed.run(*words)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_every_command_explains_itself(installed: Installed) -> None:
    helped = installed.run("--help").stdout
    names = [line.split()[0] for line in helped.partition("Commands:")[2].splitlines() if line[2:3].isalpha()]
    assert {"plan", "up", "doctor", "down"} <= set(names)
    for name in names:
        done = installed.run(name, "--help")
        if name == "serve":
            continue  # the engine's own; see below
        assert (done.returncode, done.stderr) == (0, ""), name
        assert done.stdout.startswith(f"Usage: forebay {name}"), name


def test_plan_refuses_what_does_not_fit_and_machine_reads_this_one(installed: Installed) -> None:
    flags = ["kimi-k2.5", "--server", "sglang", "--tp", "8", "--gpus", "8x141GB", "--host-memory", "449GB", "--json"]
    refused = installed.run("plan", *flags, "--", "--hicache-size", "300")
    assert refused.returncode == 3, refused.stderr
    assert json.loads(refused.stdout)["fits"] is False
    read = installed.run("machine", "--json")
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout)


def test_doctor_reads_a_log(installed: Installed) -> None:
    log = ROOT / "tests" / "data" / "captures" / "sglang" / "fail_bad_flag.log"
    done = installed.run("doctor", str(log), "--json")
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["cause"] == "bad_flag", done.stdout


def test_serve_says_how_to_get_the_engine(installed: Installed) -> None:
    done = installed.run("serve", "smollm2")
    assert done.returncode == 2
    assert "forebay[engine]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.engine
def test_without_a_compiler_the_engine_serves_with_torch_and_warns(tmp_path: Path) -> None:
    """In this environment, which has the engine; with no library built before, and no compiler on PATH."""
    empty = tmp_path / "bin"
    empty.mkdir()
    folder = make_tiny("llama", tmp_path / "tiny", decisive=True)
    environment = {name: text for name, text in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(empty), "FOREBAY_CACHE": str(tmp_path / "cache")}
    server = ServerProcess(str(folder), tmp_path / "log", "--served-model-name", "tiny", environment=environment)
    try:
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4})
        assert answer.status == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        warnings = [line for line in server.text().splitlines() if " WARNING " in line]
        assert any("no C++ compiler" in line for line in warnings), server.text()
        assert not list((tmp_path / "cache").rglob("*.so"))
    finally:
        server.kill()
