"""A small GGUF file for plans; what is read of it is tested in tests/model."""

from __future__ import annotations

import struct
from pathlib import Path

from forebay.model.gguf_header import read_gguf


def write_small(folder: Path) -> Path:
    """A Llama of two layers whose vocabulary is 32 tokens."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    numbers = {
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 512,
        "vocab_size": 32,
    }
    body = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for name, value in numbers.items():
        body += text(f"llama.{name}") + struct.pack("<II", 4, value)
    body += text("token_embd.weight") + struct.pack("<I2QIQ", 2, 64, 32, 1, 0)
    path = folder / "small.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, len(numbers) + 1) + body)
    return path


def test_the_file_is_one_that_can_be_read(tmp_path: Path) -> None:
    assert read_gguf(write_small(tmp_path)).metadata["llama.block_count"] == 2
