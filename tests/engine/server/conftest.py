"""The real server on SmolLM2, once for all tests that only ask it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from forebay.engine.model_import.resolve import resolve_model

    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Small on purpose: 64 MB hold about 2,700 tokens, so that eviction and preemption happen."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    running = ServerProcess(
        str(smollm2), log, "--served-model-name", "smollm2", "--host-cache", "100MB", "--max-queue", "64"
    )
    yield running
    running.kill()


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[object]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def private_tmp() -> Iterator[Path]:
    """A TMPDIR for one server; its path is short, as Unix sockets need."""
    folder = Path(tempfile.mkdtemp(prefix="fbt-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
