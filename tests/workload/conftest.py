"""Makes the null server importable, and starts it as a process where a test kills it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(Path(__file__).parent)]

from workload_processes import NullServer  # noqa: E402


@pytest.fixture
def null_server() -> Iterator[NullServer]:
    """A null server with a prefix cache, on a port of its own."""
    server = NullServer("--cache-blocks", "100000")
    try:
        yield server
    finally:
        server.kill()
