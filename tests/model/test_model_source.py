"""Where MODEL comes from, and what is said when it comes from nowhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.model.source import resolve


def test_a_name_comes_from_the_catalogue_and_launches_by_its_hub_id() -> None:
    model = resolve("kimi-k2.5")
    assert (model.kind, model.location) == ("catalogue", "moonshotai/Kimi-K2.5")
    assert model.facts_source.startswith("https://")


def test_a_hub_id_in_the_local_cache_is_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,'
        ' "num_attention_heads": 4, "vocab_size": 10}'
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    model = resolve("some/model")
    assert (model.kind, model.path) == ("hub", snapshot)
    assert "no safetensors" in model.weights_how


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A hub on this machine: address -> answer; everything else is 404."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path)
            self.send_response(200 if data is not None else 401 if "gated" in self.path else 404)
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield files
    server.shutdown()
    server.server_close()


CONFIG = (
    b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,'
    b' "num_attention_heads": 4, "vocab_size": 10}'
)


def test_an_unknown_hub_id_is_read_from_the_hub(hub: dict[str, bytes]) -> None:
    hub["/some/model/resolve/main/config.json"] = CONFIG
    model = resolve("some/model")
    assert (model.kind, model.location, model.geometry.num_layers) == ("hub", "some/model", 1)
    hub["/some/model/resolve/main/model.safetensors.index.json"] = b'{"metadata": {"total_size": 123456}}'
    assert sum(part.size_bytes for part in resolve("some/model").components) == pytest.approx(123456, abs=4)


def test_a_hub_that_cannot_be_read_is_one_clear_line(hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="the hub answers 404"):
        resolve("no/model")
    with pytest.raises(UsageError, match="gated, private, or not there") as caught:
        resolve("gated/model")
    assert caught.value.code == "license_or_auth"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match="the hub cannot be read"):
        resolve("some/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        resolve("some/model")


def test_a_path_that_is_not_there_is_never_taken_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder or file"):
        resolve(str(tmp_path / "kimi-k2.5"))


def test_an_unknown_name_lists_the_catalogue() -> None:
    with pytest.raises(UsageError, match="'no-such-model'") as caught:
        resolve("no-such-model")
    assert "kimi-k2.5" in (caught.value.fix or "")


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: no such file"):
        resolve(str(tmp_path))
