"""Architectures by the name in ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.engine.models.decoder import Model
from forebay.engine.models.deepseek import build_deepseek, read_deepseek_v2, read_deepseek_v3
from forebay.engine.models.gemma3 import Gemma3Config, Gemma3Decoder, read_gemma3_config
from forebay.engine.models.layers import ModelContext
from forebay.engine.models.llama import LlamaConfig, build_llama, read_llama_config
from forebay.engine.models.moe_llama import build_mixtral, build_qwen3_moe, read_mixtral, read_qwen3_moe
from forebay.errors import UsageError

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "text_config"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family.

    Args:
        read: checks the (text) config for a number of ranks; raises UsageError before any weight is read.
        load: builds the model.
    """

    read: Callable[..., Any]
    load: Callable[[ModelContext, Any], Model]


def _llama(build: ModelContext, config: LlamaConfig) -> Model:
    return build_llama(build, config)


def _qwen3(build: ModelContext, config: LlamaConfig) -> Model:
    return build_llama(build, config, qk_norm=True)


def _gemma3(build: ModelContext, config: Gemma3Config) -> Model:
    return Gemma3Decoder(build, config)


_LLAMA = Architecture(read_llama_config, _llama)
_GEMMA3 = Architecture(read_gemma3_config, _gemma3)
_DEEPSEEK_V3 = Architecture(read_deepseek_v3, build_deepseek)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": Architecture(read_llama_config, _qwen3),
    "Qwen3MoeForCausalLM": Architecture(read_qwen3_moe, build_qwen3_moe),
    "MixtralForCausalLM": Architecture(read_mixtral, build_mixtral),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "DeepseekV2ForCausalLM": Architecture(read_deepseek_v2, build_deepseek),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK2ForCausalLM": _DEEPSEEK_V3,
    # Kimi-K2.5 is published under the first name; transformers saves it under the second.
    "KimiK25ForConditionalGeneration": _DEEPSEEK_V3,
    "Kimi_K25ForConditionalGeneration": _DEEPSEEK_V3,
}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The family of a ``config.json``.

    Raises:
        UsageError: one we do not have; the message lists those we have.
    """
    names = config.get("architectures") or [None]
    found = ARCHITECTURES.get(names[0])
    if found is None:
        raise UsageError(
            f"config.json names architecture {names[0]!r}, which Forebay does not have",
            fix=f"it has {', '.join(sorted(ARCHITECTURES))}",
        )
    return found


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's config: ``text_config`` of a multimodal checkpoint, with what only the outer one says."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    merged = dict(inner)
    for key in ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"):
        if key not in merged and key in config:
            merged[key] = config[key]
    return merged
