"""Geometry and weight bytes of a GGUF file, by reading only its header.

Format (ggml ``docs/gguf.md``): magic ``GGUF``, version, counts of tensors and of metadata pairs, the pairs, then for
each tensor its name, shape, type and offset. Sizes come from the block sizes of ggml's types.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from forebay.errors import UsageError

__all__ = ["GgufHeader", "config_of", "read_gguf"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# ggml type -> (values a block, bytes a block); ggml.c type traits
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 39: (32, 17),
}  # fmt: skip
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "deepseek2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the header says: scalar metadata, lengths of arrays, and each tensor's name, shape and bytes."""

    metadata: Mapping[str, Any]
    array_lengths: Mapping[str, int]
    tensors: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, _, size in self.tensors)


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of ``path``.

    Raises:
        UsageError: no GGUF, cut short, or a tensor type that is not known here.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file", code="checkpoint_missing") from error
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a complete GGUF file: {error}", code="checkpoint_corrupt") from error


def config_of(header: GgufHeader, path: Path) -> dict[str, Any]:
    """The metadata as the config.json of the same architecture, for ``read_geometry``.

    Raises:
        UsageError: an architecture with no known translation.
    """
    meta = header.metadata
    name = str(meta.get("general.architecture", "?"))
    if name not in _ARCHITECTURES:
        raise UsageError(
            f"{path}: GGUF architecture {name!r} is not known here",
            fix=f"known are {', '.join(sorted(_ARCHITECTURES))}; or point to the model's folder with a config.json",
            code="unsupported_architecture",
        )
    model_type, architecture = _ARCHITECTURES[name]
    vocab = header.array_lengths.get("tokenizer.ggml.tokens") or meta.get(f"{name}.vocab_size")
    fields = {
        "num_hidden_layers": f"{name}.block_count",
        "hidden_size": f"{name}.embedding_length",
        "intermediate_size": f"{name}.feed_forward_length",
        "num_attention_heads": f"{name}.attention.head_count",
        "num_key_value_heads": f"{name}.attention.head_count_kv",
        "head_dim": f"{name}.attention.key_length",
        "max_position_embeddings": f"{name}.context_length",
        "sliding_window": f"{name}.attention.sliding_window",
        "num_experts": f"{name}.expert_count",
        "num_experts_per_tok": f"{name}.expert_used_count",
        "moe_intermediate_size": f"{name}.expert_feed_forward_length",
        "kv_lora_rank": f"{name}.attention.kv_lora_rank",
        "q_lora_rank": f"{name}.attention.q_lora_rank",
        "qk_rope_head_dim": f"{name}.rope.dimension_count" if name == "deepseek2" else "",
    }
    config: dict[str, Any] = {field: meta[key] for field, key in fields.items() if meta.get(key)}
    tied = not any(tensor == "output.weight" for tensor, _, _ in header.tensors)
    config |= {
        "model_type": model_type,
        "architectures": [architecture],
        "dtype": "bfloat16",
        "tie_word_embeddings": tied,
    }
    if vocab:
        config["vocab_size"] = vocab
    return config


def _read(file: BinaryIO) -> GgufHeader:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, tensors, pairs = struct.unpack("<IQQ", _take(file, 20))
    if version not in (2, 3):
        raise ValueError(f"version {version} is not known here")
    metadata: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for _ in range(pairs):
        key, kind = _string(file), struct.unpack("<I", _take(file, 4))[0]
        if kind == _ARRAY:
            lengths[key] = _skip_array(file)
        else:
            metadata[key] = _value(file, kind)
    return GgufHeader(metadata, lengths, tuple(_tensor(file) for _ in range(tensors)))


def _tensor(file: BinaryIO) -> tuple[str, tuple[int, ...], int]:
    name, dimensions = _string(file), struct.unpack("<I", _take(file, 4))[0]
    shape = struct.unpack(f"<{dimensions}Q", _take(file, 8 * dimensions))
    kind, _ = struct.unpack("<IQ", _take(file, 12))
    if kind not in _BLOCKS:
        raise ValueError(f"tensor {name!r} has type {kind}, which is not known here")
    values, size = _BLOCKS[kind]
    count = 1
    for length in shape:
        count *= length
    return name, tuple(shape), count // values * size


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind not in _SCALARS:
        raise ValueError(f"metadata type {kind} is not known")
    form = _SCALARS[kind]
    return struct.unpack(form, _take(file, struct.calcsize(form)))[0]


def _skip_array(file: BinaryIO) -> int:
    kind, length = struct.unpack("<IQ", _take(file, 12))
    if kind == _STRING:
        for _ in range(length):
            file.seek(struct.unpack("<Q", _take(file, 8))[0], 1)
    elif kind in _SCALARS:
        file.seek(length * struct.calcsize(_SCALARS[kind]), 1)
    else:
        raise ValueError(f"arrays of type {kind} are not known")
    return int(length)


def _string(file: BinaryIO) -> str:
    return _take(file, struct.unpack("<Q", _take(file, 8))[0]).decode("utf-8")


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("its header is cut short")
    return data
