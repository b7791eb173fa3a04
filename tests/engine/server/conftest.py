"""The real server on SmolLM2, once for all tests that only ask it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess
from tiny_models import VOCAB, edit_config, make_tiny


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
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose checkpoint names tokens that it has no rows for: two end tokens,
    and one a text can contain.
    """
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny", decisive=True)
    edit_config(folder, lambda config: config.update(eos_token_id=[1, VOCAB, VOCAB + 100]))
    (folder / "generation_config.json").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    outside = {**tokenizer["added_tokens"][-1], "id": VOCAB, "content": "<outside>"}
    tokenizer["added_tokens"].append(outside)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The tiny model: answers in milliseconds, so that thousands of requests are quick."""
    log = tmp_path_factory.mktemp("tiny-server") / "server.log"
    running = ServerProcess(str(tiny_folder), log, "--served-model-name", "tiny")
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
