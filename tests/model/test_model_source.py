"""Where MODEL comes from, and what is said when it comes from nowhere."""

from __future__ import annotations

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
