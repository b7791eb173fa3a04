"""The library is built once, whatever starts at the same time; without a compiler the fallback serves."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.compiler import cpp
from forebay.engine.kernels import load_backend
from forebay.engine.kernels.library import variants
from forebay.engine.kernels.native import build
from forebay.errors import UsageError

pytestmark = pytest.mark.engine


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes what it was asked for, and counts its runs in ``runs``."""
    script = tmp_path / "fake-c++"
    runs = tmp_path / "runs"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--version*) echo "fake 1";; *-E*) ;; *) echo "$*" >> {runs};\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    return runs


def test_two_starters_build_it_once(fake_compiler: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = {future.result() for future in [pool.submit(build.build_library) for _ in range(4)]}
    assert len(paths) == 1
    links = [line for line in fake_compiler.read_text().splitlines() if "-shared" in line]
    assert len(links) == 1
    before = fake_compiler.read_text()
    assert build.build_library() in paths
    assert fake_compiler.read_text() == before
    leftovers = [path.name for path in paths.pop().parent.iterdir() if path.name.startswith("build-")]
    assert leftovers == []


def test_a_changed_compiler_or_flag_is_another_file(fake_compiler: Path) -> None:
    assert build.build_library() != build.build_library(sanitize=True)


def test_a_failing_compiler_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bad-c++"
    script.write_text('#!/bin/sh\ncase "$*" in *-c*) echo "no such flag: -fwonder" >&2; exit 3;; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match="no such flag: -fwonder"):
        build.build_library()
    assert load_backend("auto", threads=1).name == "torch"


def test_without_a_compiler_torch_serves_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FOREBAY_KERNELS", raising=False)
    monkeypatch.setattr(cpp, "_COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert load_backend("auto", threads=1).name == "torch"
    assert "no C++ compiler" in caplog.text
    with pytest.raises(UsageError, match="no C\\+\\+ compiler"):
        load_backend("native", threads=1)


def test_an_unknown_variant_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="generic"):
        load_backend("sse9", threads=1)


def test_the_sanitizers_find_nothing() -> None:
    """Every kernel once on ragged shapes, in the best variant and the generic one, under both sanitizers."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler} has no address sanitizer runtime")
    library = build.build_library(sanitize=True, only=variants()[:1])
    driver = Path(__file__).with_name("sanitized_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(library)],
        env={
            "PATH": "/usr/bin:/bin",
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": ":".join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all kernels ran" in done.stdout
