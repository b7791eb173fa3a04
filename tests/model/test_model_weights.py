"""Weight bytes without loading: headers, shards, GGUF, and formulas checked against published sizes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.model.catalogue import find
from forebay.model.families import read_geometry
from forebay.model.parameters import Component, Share, from_geometry, rank_bytes, share_of, total_bytes
from forebay.model.safetensors_header import checkpoint_files, read_checkpoint, read_header
from forebay.model.source import resolve


def write_shard(path: Path, tensors: dict[str, tuple[list[int], int]]) -> None:
    """A real safetensors file: name -> (shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, size) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(end))


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_shard(tmp_path / "a.safetensors", {"model.embed_tokens.weight": ([256, 64], 32768)})
    write_shard(
        tmp_path / "b.safetensors",
        {
            "model.layers.0.self_attn.q_proj.weight": ([64, 64], 8192),
            "model.layers.0.self_attn.k_proj.weight": ([32, 64], 4096),
            "model.layers.0.input_layernorm.weight": ([64], 128),
            "model.layers.0.mlp.up_proj.weight": ([128, 64], 16384),
        },
    )
    return tmp_path


def test_bytes_are_the_sum_over_headers(folder: Path) -> None:
    assert sum(tensor.size_bytes for tensor in read_checkpoint(folder)) == 32768 + 8192 + 4096 + 128 + 16384


def test_a_rank_holds_its_part_of_each_kind(folder: Path) -> None:
    model = resolve(str(folder))
    # vocabulary, query and MLP in 4 parts, KV heads in 2, the norm whole
    assert rank_bytes(model.components, 2, 4, 4) == (32768 + 8192 + 16384) // 4 + 4096 // 2 + 128
    assert rank_bytes(model.components, 2, 1, 1) == total_bytes(model.components)


def test_a_file_cut_short_is_named_with_both_lengths(folder: Path) -> None:
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"b\.safetensors.*tensors end at byte") as caught:
        resolve(str(folder))
    assert caught.value.code == "checkpoint_corrupt"


@given(st.integers(min_value=0, max_value=200))
def test_a_header_cut_anywhere_is_one_clear_error(kept: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "x.safetensors"
        write_shard(path, {"model.layers.0.self_attn.q_proj.weight": ([64, 64], 8192)})
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(UsageError, match="not a complete safetensors file"):
            read_header(path)


def test_a_missing_shard_of_the_index_is_named(folder: Path) -> None:
    index = {"weight_map": {"x": "a.safetensors", "y": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="1 of 2 weight files are missing, the first is model-00002") as caught:
        checkpoint_files(folder)
    assert caught.value.code == "checkpoint_missing"


def test_only_the_files_the_index_names_are_read(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert [path.name for path in checkpoint_files(folder)] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("name", "published"),
    [  # total parameter bytes as the model cards give them
        ("llama-3.1-8b", 16.06e9),
        ("llama-3.1-70b", 141.1e9),
        ("llama-3.1-405b", 811.7e9),
        ("qwen3-32b", 65.5e9),
        ("qwen3-235b-a22b", 470.2e9),
        ("mixtral-8x7b", 93.4e9),
        ("deepseek-v3", 671e9),
        ("kimi-k2.5", 595e9),
        ("gpt-oss-120b", 65.2e9),
        ("glm-4.5", 2 * 355e9),
        ("gemma-3-27b", 54.0e9),
    ],
)
def test_formula_weights_are_the_published_sizes(name: str, published: float) -> None:
    entry = find(name)
    assert entry is not None
    assert total_bytes(from_geometry(read_geometry(entry.config))) == pytest.approx(published, rel=0.02)


def test_kimi_packs_only_the_routed_experts() -> None:
    entry = find("kimi-k2.5")
    assert entry is not None
    parts = {item.name: item.size_bytes for item in from_geometry(read_geometry(entry.config))}
    experts = 60 * 384 * 3 * 7168 * 2048
    assert parts["experts"] == experts // 2 + experts // 32 * 2
    assert parts["mlp"] == 2 * (3 * 7168 * 18432 + 60 * 3 * 7168 * 2048)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("model.layers.3.self_attn.q_proj.weight", Share.ATTENTION),
        ("model.layers.3.self_attn.k_proj.bias", Share.KV_HEADS),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", Share.ALL),
        ("model.layers.3.self_attn.kv_b_proj.weight", Share.ATTENTION),
        ("model.layers.3.mlp.gate.weight", Share.ALL),
        ("model.layers.3.mlp.gate_proj.weight", Share.TENSOR),
        ("model.layers.3.mlp.experts.7.down_proj.weight_packed", Share.TENSOR),
        ("model.layers.3.post_attention_layernorm.weight", Share.ALL),
        ("language_model.model.embed_tokens.weight", Share.VOCABULARY),
        ("lm_head.weight", Share.VOCABULARY),
        ("blk.3.attn_k.weight", Share.KV_HEADS),
        ("token_embd.weight", Share.VOCABULARY),
        ("vision_tower.encoder.blocks.0.wqkv.weight", Share.ALL),
    ],
)
def test_a_tensors_share_is_told_by_its_name(name: str, share: Share) -> None:
    assert share_of(name) is share


@given(
    sizes=st.lists(st.tuples(st.integers(0, 10**12), st.sampled_from(list(Share))), min_size=1, max_size=6),
    kv_heads=st.integers(1, 64),
)
def test_more_ranks_never_hold_more_each_and_never_less_together(sizes: list[tuple[int, Share]], kv_heads: int) -> None:
    parts = [Component(share.value, size, share) for size, share in sizes]
    ranks = [1, 2, 4, 8, 16]
    held = [rank_bytes(parts, kv_heads, tp, tp) for tp in ranks]
    assert held == sorted(held, reverse=True)
    for tp, each in zip(ranks, held):
        assert each * tp >= total_bytes(parts) * (1 - 1e-9) - tp
