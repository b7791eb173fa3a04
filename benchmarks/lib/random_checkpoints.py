"""Random checkpoints of real size in the real formats, made once into the cache folder.

Each model exists twice: with INT4 weights (compressed-tensors pack-quantized, symmetric, groups of 32) and with the
same weights in bf16: the dequantised values, so that both must give the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.paths import cache_dir

__all__ = ["DENSE_1B", "KIMI", "Shape", "checkpoint", "weight_bytes"]

Tensors = Iterator[tuple[str, torch.Tensor]]
_CHUNK_ROWS = 4096
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32"}


@dataclass(frozen=True)
class Shape:
    """A model: its (text) config, and what stands around it.

    Args:
        name: of the folder.
        config: the language model's config.json.
        prefix: before every tensor's name.
        outer: config.json around ``config``, which goes into its ``text_config``; None: ``config`` is all of it.
        ignore: what the checkpoint says is not quantized.
    """

    name: str
    config: dict[str, Any]
    prefix: str = ""
    outer: dict[str, Any] | None = None
    ignore: tuple[str, ...] = ("lm_head",)


_COMMON: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DENSE_1B = Shape(
    "dense-1b",
    {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 10000.0,
    },
)
KIMI = Shape(
    "kimi",
    {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    prefix="language_model.",
    outer={
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
    },
    ignore=("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"),
)


def checkpoint(shape: Shape, form: str) -> Path:
    """The folder of a model as ``int4`` or ``bf16``; made when it is not there (seconds to a minute)."""
    folder = cache_dir() / "benchmarks" / f"{shape.name}-{form}"
    if (folder / "config.json").exists():
        return folder
    print(f"# making {folder.name}", flush=True)
    building = folder.with_name(f"{folder.name}.{os.getpid()}")
    building.mkdir(parents=True)
    _write_safetensors(building / "model.safetensors", shape, form == "int4")
    _write_tokenizer(building, shape.config["vocab_size"])
    (building / "config.json").write_text(json.dumps(_config(shape, form == "int4"), indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    return folder


def weight_bytes(shape: Shape, form: str) -> tuple[int, int]:
    """(bytes of weights one decoded token reads, bytes of all weights), as stored and as packed alike.

    A token reads one row of the embeddings, the experts it is routed to, and everything else.
    """
    read = held = 0.0
    for module, size, packed in _modules(shape):
        entries = _entries(module, size, packed and form == "int4")
        nbytes = sum(t.itemsize * torch.Size(dims).numel() for name, t, dims in entries if "weight_shape" not in name)
        share = 1.0
        if "embed_tokens" in module:
            share = 1 / size[0]
        elif ".experts." in module:
            share = shape.config["num_experts_per_tok"] / shape.config["n_routed_experts"]
        held += nbytes
        read += nbytes * share
    return round(read), round(held)


def _config(shape: Shape, int4: bool) -> dict[str, Any]:
    config = dict(shape.config)
    if int4:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": list(shape.ignore),
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        }
    return config if shape.outer is None else {**shape.outer, "text_config": config}


def _modules(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(name, shape, whether INT4 in the quantized form) of every tensor's module; one dimension: a norm or a bias."""
    c = shape.config
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield "model.embed_tokens", (vocab, hidden), False
    for index in range(c["num_hidden_layers"]):
        at = f"model.layers.{index}"
        yield f"{at}.input_layernorm", (hidden,), False
        yield f"{at}.post_attention_layernorm", (hidden,), False
        if "kv_lora_rank" in c:
            yield from _latent_layer(c, at, index)
        else:
            yield from _dense_layer(c, at)
    yield "model.norm", (hidden,), False
    yield "lm_head", (vocab, hidden), False


def _dense_layer(c: dict[str, Any], at: str) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    rows = {"q": c["num_attention_heads"] * dim, "k": c["num_key_value_heads"] * dim}
    rows["v"] = rows["k"]
    for name, count in rows.items():
        yield f"{at}.self_attn.{name}_proj", (count, hidden), True
    yield f"{at}.self_attn.o_proj", (hidden, rows["q"]), True
    yield from _mlp(f"{at}.mlp", hidden, c["intermediate_size"], True)


def _latent_layer(c: dict[str, Any], at: str, index: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    hidden, heads, attn = c["hidden_size"], c["num_attention_heads"], f"{at}.self_attn"
    q_rank, kv_rank, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
    yield f"{attn}.q_a_proj", (q_rank, hidden), False
    yield f"{attn}.q_a_layernorm", (q_rank,), False
    yield f"{attn}.q_b_proj", (heads * (nope + rope), q_rank), False
    yield f"{attn}.kv_a_proj_with_mqa", (kv_rank + rope, hidden), False
    yield f"{attn}.kv_a_layernorm", (kv_rank,), False
    yield f"{attn}.kv_b_proj", (heads * (nope + value), kv_rank), False
    yield f"{attn}.o_proj", (hidden, heads * value), False
    if index < c["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", hidden, c["intermediate_size"], False)
        return
    width = c["moe_intermediate_size"]
    yield f"{at}.mlp.gate", (c["n_routed_experts"], hidden), False
    yield f"{at}.mlp.gate.e_score_correction_bias", (c["n_routed_experts"],), False
    for expert in range(c["n_routed_experts"]):
        yield from _mlp(f"{at}.mlp.experts.{expert}", hidden, width, True)
    yield from _mlp(f"{at}.mlp.shared_experts", hidden, width * c["n_shared_experts"], False)


def _mlp(at: str, hidden: int, width: int, int4: bool) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    yield f"{at}.gate_proj", (width, hidden), int4
    yield f"{at}.up_proj", (width, hidden), int4
    yield f"{at}.down_proj", (hidden, width), int4


def _tensors(shape: Shape, int4: bool) -> Tensors:
    """Every tensor, one at a time; the same numbers in both forms."""
    generator = torch.Generator().manual_seed(1)
    for module, size, packed in _modules(shape):
        name = f"{shape.prefix}{module}"
        if len(size) == 1:
            is_bias = module.endswith("bias")
            values = torch.randn(size, generator=generator) * 0.1 + (0.0 if is_bias else 1.0)
            yield name if is_bias else f"{name}.weight", values.to(torch.float32 if is_bias else torch.bfloat16)
        elif packed:
            yield from _quantized(name, size, generator, int4)
        else:
            yield f"{name}.weight", (torch.randn(size, generator=generator) * size[1] ** -0.5).bfloat16()


def _quantized(name: str, size: tuple[int, ...], generator: torch.Generator, int4: bool) -> Tensors:
    rows, cols = size
    words = torch.empty(rows, cols // 8, dtype=torch.int32)
    words.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    spread = torch.rand(rows, cols // 32, generator=generator) + 0.5
    scale = (spread * 0.21 * cols**-0.5).bfloat16()  # nibbles less 8 have a deviation of 4.6
    if int4:
        yield f"{name}.weight_packed", words
        yield f"{name}.weight_scale", scale
        yield f"{name}.weight_shape", torch.tensor(size, dtype=torch.int32)
        return
    weight = torch.empty(rows, cols, dtype=torch.bfloat16)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    for first in range(0, rows, _CHUNK_ROWS):
        part = slice(first, first + _CHUNK_ROWS)
        values = ((words[part].unsqueeze(-1) >> shifts) & 15).float() - 8.0
        wide = values.view(-1, cols // 32, 32) * scale[part].float().unsqueeze(-1)
        weight[part] = wide.view(-1, cols).bfloat16()
    yield f"{name}.weight", weight


def _write_safetensors(path: Path, shape: Shape, int4: bool) -> None:
    """Stream the tensors: sizes first (from shapes alone), then one tensor after another."""
    header: dict[str, Any] = {}
    at = 0
    for module, size, packed in _modules(shape):
        for name, dtype, dims in _entries(f"{shape.prefix}{module}", size, packed and int4):
            nbytes = dtype.itemsize * torch.Size(dims).numel()
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": dims, "data_offsets": [at, at + nbytes]}
            at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in _tensors(shape, int4):
            begin, end = header[name]["data_offsets"]
            assert file.tell() == 8 + len(text) + begin, name
            file.write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
            assert file.tell() == 8 + len(text) + end, name


def _entries(name: str, size: tuple[int, ...], int4: bool) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    if int4:
        rows, cols = size
        yield f"{name}.weight_packed", torch.int32, [rows, cols // 8]
        yield f"{name}.weight_scale", torch.bfloat16, [rows, cols // 32]
        yield f"{name}.weight_shape", torch.int32, [2]
    elif name.endswith("bias"):
        yield name, torch.float32, list(size)
    else:
        yield f"{name}.weight", torch.bfloat16, list(size)


def _write_tokenizer(folder: Path, size: int) -> None:
    """Bytes, and a word of its own for every other id, so that each token of an answer is some text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|begin|>": 0, "<|end|>": 1} | {letter: 2 + i for i, letter in enumerate(alphabet)}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
