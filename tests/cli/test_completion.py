"""Shell completion, asked of the real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_BASH = """
eval "$(forebay completion bash)"
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
compopt() {{ echo "compopt" "$1" "$2"; }}
_forebay_completion forebay
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """PATH with a ``forebay`` command, and a FOREBAY_HOME with two runs."""
    command = tmp_path / "bin" / "forebay"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m forebay.cli "$@"\n')
    command.chmod(0o755)
    for name in ("chat", "batch"):
        folder = tmp_path / "home" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    return os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}", "FOREBAY_HOME": str(tmp_path / "home")}


def in_shell(environment: dict[str, str], *command: str) -> list[str]:
    """Lines that ``command`` prints; the shell is skipped where it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("forebay do", ["doctor", "down"]),
        ("forebay down ''", ["batch", "chat"]),
        ("forebay doctor ch", ["chat"]),
        ("forebay plan kimi-k2.", ["kimi-k2.5"]),
        ("forebay plan --server v", ["vllm"]),
        ("forebay up ./no-model-begins-so", ["compopt -o default", ""]),
    ],
)
def test_bash_offers_commands_runs_models_and_values(
    words: str, offered: list[str], environment: dict[str, str]
) -> None:
    script = _BASH.format(words=words)
    assert in_shell(environment, "bash", "--norc", "-c", script) == offered


def test_fish_offers_commands_and_runs(environment: dict[str, str]) -> None:
    def ask(line: str) -> list[str]:
        script = f"forebay completion fish | source; complete -C {line!r}"
        return [found.partition("\t")[0] for found in in_shell(environment, "fish", "--no-config", "-c", script)]

    assert ask("forebay do") == ["doctor", "down"]
    assert ask("forebay down ") == ["batch", "chat"]


def test_zsh_accepts_the_script(environment: dict[str, str]) -> None:
    script = 'autoload -Uz compinit; compinit -u -d "$FOREBAY_HOME/dump"; eval "$(forebay completion zsh)"; '
    assert in_shell(environment, "zsh", "-f", "-c", script + "whence -w _forebay_completion") == [
        "_forebay_completion: function"
    ]


def test_an_unknown_shell_is_refused_with_the_known_ones(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli", "completion", "tcsh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "bash" in done.stderr
    assert "Traceback" not in done.stderr
