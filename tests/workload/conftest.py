"""The null server as a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workload_processes import NullServer


@pytest.fixture
def null_server() -> Iterator[NullServer]:
    """A null server with a prefix cache, on a port of its own."""
    server = NullServer("--cache-blocks", "100000")
    try:
        yield server
    finally:
        server.kill()
