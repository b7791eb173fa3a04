"""Geometry from config.json: what each family's layers keep, and one clear line for what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.kv.geometry_spec import kv_spec, state_bytes_per_request
from forebay.model.catalogue import entries, find, guess
from forebay.model.families import load_geometry, read_geometry
from forebay.model.geometry import LayerKind, ModelGeometry

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def geometry(**changes: Any) -> ModelGeometry:
    return read_geometry({**LLAMA, **changes})


def test_grouped_query_keeps_a_key_and_a_value_for_each_kv_head() -> None:
    assert kv_spec(geometry(), 16).bytes_per_token == 32 * 2 * 8 * 128 * 2


def test_kv_heads_are_split_over_ranks_and_repeated_where_there_are_fewer() -> None:
    spec = kv_spec(geometry(), 16)
    assert [spec.bytes_per_token_per_rank(tp) for tp in (1, 2, 4, 8, 16)] == [131072, 65536, 32768, 16384, 16384]


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match="8 KV heads cannot be divided over 3 ranks"):
        kv_spec(geometry(), 16).bytes_per_token_per_rank(3)


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "kinds"),
    [
        ("kimi-k2.5", 70_272, {"latent": 61}),
        ("deepseek-v3", 70_272, {"latent": 61}),
        ("deepseek-v3.2", 61 * (576 * 2 + 128 + 4), {"latent": 61}),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2, {"sliding": 18, "full": 18}),
        ("gemma-3-27b", 62 * 2 * 16 * 128 * 2, {"sliding": 52, "full": 10}),
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2, {"recurrent": 36, "full": 12}),
        ("glm-4.5", 92 * 2 * 8 * 128 * 2, {"full": 92}),
        ("ling-3.0-flash", 7 * 576 * 2, {"recurrent": 35, "latent": 7}),
        ("gemma-4-e4b", 20 * 2 * 2 * 256 * 2 + 4 * 2 * 2 * 512 * 2, {"sliding": 20, "full": 4, "shared": 18}),
    ],
)
def test_catalogue_models_keep_what_their_layers_keep(name: str, bytes_per_token: int, kinds: dict[str, int]) -> None:
    entry = find(name)
    assert entry is not None
    model = read_geometry(entry.config)
    assert kv_spec(model, 64).bytes_per_token == bytes_per_token
    assert {kind.value: count for kind, count in model.kinds().items()} == kinds


def test_the_last_of_four_qwen3_next_layers_attends() -> None:
    entry = find("qwen3-next-80b-a3b")
    assert entry is not None
    layers = read_geometry(entry.config).layers
    assert [layer.kind for layer in layers[:4]] == [LayerKind.RECURRENT] * 3 + [LayerKind.FULL]


def test_linear_attention_state_has_one_size_a_request_and_is_sharded() -> None:
    entry = find("qwen3-next-80b-a3b")
    assert entry is not None
    model = read_geometry(entry.config)
    convolution = 36 * (2 * 16 * 128 + 32 * 128) * 3 * 2
    state = 36 * 32 * 128 * 128 * 4
    assert state_bytes_per_request(model, 1).total == convolution + state
    assert state_bytes_per_request(model, 4).total == (convolution + state) // 4


def test_a_multimodal_config_is_read_through_its_text_part() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    model = read_geometry({"architectures": ["XForConditionalGeneration"], "text_config": text, "vision_config": {}})
    assert model.architecture == "XForConditionalGeneration"
    assert model.num_layers == 32
    assert model.vision == (24, 1024)


def test_explicit_layer_types_win_over_the_familys_rule() -> None:
    kinds = ["full_attention", "sliding_attention"] * 16
    spec = kv_spec(geometry(layer_types=kinds, sliding_window=512), 16)
    assert [(group.name, len(group.layers), group.window) for group in spec.groups] == [
        ("full", 16, None),
        ("sliding", 16, 512),
    ]


def test_mamba_hybrids_say_by_pattern_which_layer_attends() -> None:
    model = geometry(
        model_type="nemotron_h",
        num_hidden_layers=4,
        hybrid_override_pattern="M-M*",
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
    )
    assert [layer.kind for layer in model.layers] == ["recurrent", "shared", "recurrent", "full"]
    assert state_bytes_per_request(model, 1).recurrent_bytes == 2 * 128 * 64 * 128 * 4


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_a_missing_field_is_one_line_naming_file_and_field(field: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in LLAMA.items() if key != field}))
    with pytest.raises(UsageError) as caught:
        load_geometry(path)
    assert str(path) in caught.value.message
    assert repr(field) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", "32"), ("num_key_value_heads", 0), ("hidden_size", 4.5), ("dtype", "int3")],
)
def test_a_wrong_value_is_refused_with_the_value(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        geometry(**{field: value})


def test_an_unknown_kind_of_layer_is_refused_and_not_counted_as_nothing() -> None:
    with pytest.raises(UsageError, match="compressed_sparse_attention") as caught:
        geometry(layer_types=["compressed_sparse_attention"] * 32)
    assert caught.value.code == "unsupported_architecture"


def test_every_catalogue_entry_has_a_source_and_can_be_read() -> None:
    for entry in entries():
        assert entry.source.startswith("https://"), entry.name
        assert kv_spec(read_geometry(entry.config), 1).bytes_per_token > 0, entry.name


def test_names_are_found_whatever_their_case_organisation_and_variant() -> None:
    for text in (
        "Kimi-K2.5",
        "moonshotai/Kimi-K2.5",
        "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
        "llama-3.1-8b-instruct",
    ):
        assert find(text) is not None, text
    assert find("qwen3") is None


def test_a_guess_takes_the_longest_name_in_free_text() -> None:
    found = guess("not shown (30 shards -> Llama-3.1-70B class)")
    assert found is not None
    assert found.name == "llama-3.1-70b"
    assert guess("some private model") is None
