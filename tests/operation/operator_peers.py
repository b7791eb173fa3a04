"""Where the real SGLang and vLLM are: installed once by the project's own recipe, or a plain reason to skip."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from operator_driving import REPO

from forebay.paths import cache_dir

_INSTALL_S = 1200


@functools.cache
def peer(name: str) -> Path:
    """The environment of ``name``; installs it when it is missing (minutes, a few GB, needs a package registry)."""
    root = cache_dir() / "peers" / name
    done = subprocess.run(
        [sys.executable, str(REPO / "scripts" / "peers" / "install.py"), name],
        capture_output=True, text=True, timeout=_INSTALL_S, check=False, env=os.environ.copy(),
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"{name} is not installed and cannot be: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return root


@functools.cache
def real_model() -> Path:
    """SmolLM2-135M as a folder; skipped where its package cannot be had."""
    code = "from forebay.engine.model_import.resolve import resolve_model; print(resolve_model('smollm2'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        pytest.skip(f"the small real model cannot be had: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip().splitlines()[-1])


def truncated_copy(model: Path, folder: Path) -> Path:
    """The model with its weights cut in half; everything else linked."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        target = folder / file.name
        if file.suffix == ".safetensors":
            data = file.read_bytes()
            target.write_bytes(data[: len(data) // 2])
        elif file.is_file():
            target.symlink_to(file)
    return folder
