"""GGUF files: tensors come out as transformers' own loader makes them, and what cannot be converted is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_tiny
from tokenizers import Tokenizer

from forebay.engine.checkpoint.checkpoint import Checkpoint
from forebay.engine.model_import.resolve import resolve_model
from forebay.errors import UsageError

pytestmark = pytest.mark.engine

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 128, 2


def write_gguf(path: Path, architecture: str, folder: Path) -> None:
    """The tiny checkpoint in ``folder`` as llama.cpp's converter would write it, matrices in Q8_0."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_name("tiny")
    _add_tokenizer(writer, folder)
    checkpoint = Checkpoint.open(folder)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA if architecture == "llama" else gguf.MODEL_ARCH.QWEN2, LAYERS
    )
    for name in checkpoint.names():
        values = checkpoint.read(name).float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = HEADS if "q_proj" in name else KV_HEADS
            values = values.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 2:
            packed = gguf.quants.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: object, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    import json

    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")  # type: ignore[attr-defined]
    writer.add_token_list([token for token, _ in vocabulary])  # type: ignore[attr-defined]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    writer.add_token_merges(merges)  # type: ignore[attr-defined]
    writer.add_bos_token_id(0)  # type: ignore[attr-defined]
    writer.add_eos_token_id(1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "architecture"), [("llama", "llama"), ("qwen2", "qwen2")])
def test_tensors_equal_those_of_transformers_gguf_loader(
    kind: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    source = make_tiny(kind, tmp_path / "source", num_hidden_layers=LAYERS)
    write_gguf(tmp_path / "tiny.gguf", architecture, source)
    seen: list[float] = []
    folder = resolve_model(str(tmp_path / "tiny.gguf"), lambda what, done: seen.append(done))
    ours = Checkpoint.open(folder)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    for name, expected in reference.state_dict().items():
        assert torch.equal(ours.read(name), expected), name
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    text = "water basin turbine"
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids == (
        Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids
    )
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(UsageError, match=r"bad\.gguf is not a sound GGUF file"):
        resolve_model(str(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache" / "models").iterdir())
