"""GGUF files by their header alone."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.kv.geometry_spec import kv_spec
from forebay.model.gguf_header import read_gguf
from forebay.model.source import resolve


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(pairs: dict[str, str | int], tensors: list[tuple[str, list[int], int]], vocabulary: int) -> bytes:
    body = b""
    for key, value in pairs.items():
        body += text(key)
        body += struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
    body += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, vocabulary) + text("t") * vocabulary
    for name, shape, kind in tensors:
        body += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs) + 1) + body


@pytest.fixture
def small(tmp_path: Path) -> Path:
    pairs: dict[str, str | int] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.context_length": 512,
    }
    tensors = [("token_embd.weight", [64, 32], 1), ("blk.0.attn_k.weight", [64, 32], 3)]
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf(pairs, tensors, 32))
    return path


def test_the_header_gives_geometry_and_bytes(small: Path) -> None:
    model = resolve(str(small))
    assert model.kind == "gguf"
    assert model.geometry.vocab_size == 32
    assert kv_spec(model.geometry, 16).bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert read_gguf(small).weight_bytes == 64 * 32 * 2 + 64 * 32 // 32 * 20


def test_without_an_output_matrix_the_embeddings_are_tied(small: Path) -> None:
    assert resolve(str(small)).geometry.tie_embeddings


@pytest.mark.parametrize("kept", [0, 3, 10, 100, 250])
def test_a_header_cut_short_is_one_clear_error(small: Path, kept: int) -> None:
    small.write_bytes(small.read_bytes()[:kept])
    with pytest.raises(UsageError, match="not a complete GGUF file") as caught:
        resolve(str(small))
    assert caught.value.code == "checkpoint_corrupt"


def test_an_unknown_architecture_lists_the_known(small: Path) -> None:
    small.write_bytes(small.read_bytes().replace(b"llama", b"zzzzz"))
    with pytest.raises(UsageError, match="'zzzzz' is not known") as caught:
        resolve(str(small))
    assert "qwen3" in (caught.value.fix or "")
