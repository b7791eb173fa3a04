"""Tiny random checkpoints in the real formats, from transformers' own configuration and model classes.

``make_tiny(kind, folder)`` writes config.json, model.safetensors and a tokenizer; it is what other tests of the engine
use too. Weights are wide enough that logits are well apart, and norms and biases are not the neutral ones that a bug
could hide behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB = 512
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    **{k: v for k, v in _BASE.items() if k != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 128,
    },
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _BASE),
    "llama_tied_bias": (
        "LlamaForCausalLM",
        {**_BASE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralForCausalLM", {**_BASE, "sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in _BASE.items() if k != "head_dim"}),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        {
            **{k: v for k, v in _BASE.items() if k != "head_dim"},
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", _BASE),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_BASE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**_BASE, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_BASE,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**_MLA, "topk_method": "group_limited_greedy", "q_lora_rank": None, "norm_topk_prob": False},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _MLA),
    "kimi_k25": ("DeepseekV3ForCausalLM", _MLA),
}


def make_tiny(
    kind: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    decisive: bool = False,
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint.

    Args:
        kind: a key of ``KINDS``.
        folder: made if need be.
        dtype: of the stored weights.
        seed: of the weights.
        decisive: lean the head towards one token after each, as training does, so that the two best logits are seldom
            within rounding of each other and a mixture's expert that flips on a rounding does not change the choice.
        overrides: config fields to change.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    class_name, settings = KINDS[kind]
    settings = {**settings, **overrides}
    torch.manual_seed(seed)
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") or kind == "gemma3" else 1.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
        if decisive and not model.config.tie_word_embeddings:
            model.lm_head.weight.add_(model.get_input_embeddings().weight.roll(1, 0), alpha=2.0)
    model.to(dtype).save_pretrained(folder)
    if kind == "kimi_k25":
        _wrap_as_kimi(transformers, folder)
    write_tokenizer(folder)
    return folder


def load_reference(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a tiny checkpoint, for eager comparison; Kimi-K2.5's is its language model."""
    import transformers

    text_only = folder / "text"
    source = text_only if text_only.exists() else folder
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.eval()


def _wrap_as_kimi(transformers: Any, folder: Path) -> None:
    """Turn a DeepSeek-V3 checkpoint into one of Kimi-K2.5's form; the plain one stays in ``text`` as the reference.

    As published: the language model under ``language_model.``, a vision tower and projector beside it, and the
    architecture's name in config.json. (transformers 5.19 would save the text layers as ``blocks``, which no published
    checkpoint does.)
    """
    from safetensors.torch import load_file, save_file

    text = folder / "text"
    text.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(text / name)
    tensors = {f"language_model.{name}": value for name, value in load_file(text / "model.safetensors").items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(32, 3, 14, 14, dtype=torch.bfloat16)
    tensors["mm_projector.proj.0.weight"] = torch.zeros(32, 32, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    text_config = json.loads((text / "config.json").read_text())
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.Kimi_K25Config(
        text_config=dict(text_config), vision_config=vision, projection_hidden_size=32, tie_word_embeddings=False
    ).save_pretrained(folder)

    def publish(config: dict[str, Any]) -> None:
        config["architectures"] = ["KimiK25ForConditionalGeneration"]
        config["text_config"]["model_type"] = "kimi_k2"

    edit_config(folder, publish)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with ``VOCAB`` ids and a chat template, trained on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [
        "water",
        "basin",
        "turbine",
        "wheel",
        "river",
        "gate",
        "level",
        "page",
        "tier",
        "rank",
        "batch",
        "step",
        "token",
        "cache",
        "pool",
        "night",
    ]
    tokenizer.train_from_iterator([f"{a} {b} the {c}" for a in words for b in words for c in words], trainer)
    for spare in range(VOCAB - tokenizer.get_vocab_size()):
        tokenizer.add_tokens([f"<spare_{spare}>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_EXPERTS_ONLY = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:vision_tower.*",
    "re:mm_projector.*",
]
"""The ``ignore`` list that Kimi-K2.5 is published with, in effect: everything but the routed experts."""


def quantize_tiny(folder: Path, scheme: str, *, experts_only: bool = False, also: tuple[str, ...] = ()) -> Path:
    """Rewrite a tiny checkpoint with quantized weights; ``text`` beside it keeps what they stand for,
    for the reference.

    Args:
        folder: written by ``make_tiny`` in float32, so that the reference's weights are exact.
        scheme: ``int4`` (compressed-tensors pack-quantized, group 32), ``int8`` (compressed-tensors, a scale a
            channel), or ``fp8`` (DeepSeek's, blocks of 128 x 128).
        experts_only: as Kimi-K2.5 does; otherwise all linears but the head and the routers.
        also: tensors to quantize beyond those.
    """
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    meant, packed = {}, {}
    for name, weight in stored.items():
        if name in also or _is_quantized(name, weight, experts_only):
            tensors, meant[name] = _QUANTIZERS[scheme](weight)
            module = name.removesuffix(".weight")
            packed.update({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})
        else:
            meant[name] = packed[name] = weight
    text = folder / "text"
    if not text.exists():
        text.mkdir()
        (text / "config.json").write_text((folder / "config.json").read_text())
    reference = {n.removeprefix("language_model."): t for n, t in meant.items() if not n.startswith(("vision", "mm_"))}
    save_file(reference, text / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})

    def declare(config: dict[str, Any]) -> None:
        config.get("text_config", config)["quantization_config"] = _quantization_config(scheme, experts_only)

    edit_config(folder, declare)
    return folder


def _is_quantized(name: str, weight: torch.Tensor, experts_only: bool) -> bool:
    if weight.dim() != 2 or ".layers." not in name or name.endswith(("gate.weight", "norm.weight")):
        return False
    return ".experts." in name if experts_only else True


def _quantization_config(scheme: str, experts_only: bool) -> dict[str, Any]:
    if scheme == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    weights = {"num_bits": 4 if scheme == "int4" else 8, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": 32} if scheme == "int4" else {"strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if scheme == "int4" else "int-quantized",
        "ignore": _EXPERTS_ONLY if experts_only else ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


def _int4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    groups = weight.view(weight.shape[0], -1, 32)
    scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    values = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    meant = (values * scale.float().unsqueeze(-1)).view_as(weight)
    packed = pack_to_int32(values.view_as(weight).to(torch.int8), 4)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}, meant


def _int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = (weight.abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16)
    values = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale.float()


def _fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, cols = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 128) * 128)
    padded[:rows, :cols] = weight
    blocks = padded.view(padded.shape[0] // 128, 128, -1, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * spread


_QUANTIZERS = {"int4": _int4, "int8": _int8, "fp8": _fp8}
