"""A GGUF file as a Hugging Face folder in bf16: config and tokenizer by transformers, tensors streamed one by one.

The names and llama.cpp's reordering of query and key rows are those of its ``convert_hf_to_gguf.py``; the tensors come
out equal to transformers' own GGUF loader (a test compares them), without its copy of the whole model in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from forebay.engine.models.rotary import RopeSettings, inverse_frequencies
from forebay.errors import UsageError

__all__ = ["import_gguf"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_BLOCK = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def import_gguf(source: Path, target: Path, progress: Callable[[float], None]) -> None:
    """Write ``target``: config.json, the tokenizer's files and model.safetensors.

    Args:
        source: the GGUF file.
        target: an empty folder.
        progress: called with the share of the tensors' bytes done.

    Raises:
        UsageError: not a GGUF file, or an architecture or tensor we cannot convert.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        architecture = str(reader.fields["general.architecture"].contents())
    except (OSError, ValueError, KeyError, IndexError, EOFError) as error:
        raise UsageError(f"{source} is not a sound GGUF file: {error}", fix="download it again") from error
    if architecture not in _ARCHITECTURES:
        raise UsageError(
            f"{source} has architecture {architecture!r}, which cannot be converted",
            fix=f"Forebay converts {', '.join(_ARCHITECTURES)}",
        )
    config = _write_config_and_tokenizer(source, target, architecture, reader)
    _write_tensors(target / "model.safetensors", reader, architecture, config, progress)


def _write_config_and_tokenizer(source: Path, target: Path, architecture: str, reader: Any) -> dict[str, Any]:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    made = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    made.save_pretrained(target)
    path = target / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["architectures"] = [_ARCHITECTURES[architecture]]
    config["dtype"] = "bfloat16"
    factors = next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        config["rope_parameters"] = _llama3_rope(np.array(factors.data, dtype=np.float32), config, source)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(target)
    return config


def _llama3_rope(factors: np.ndarray[Any, Any], config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Llama 3's rotary scaling, which GGUF keeps only as a divisor for each frequency."""
    theta = float(config["rope_parameters"]["rope_theta"])
    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dim = 2 * len(factors)
    plain, _ = inverse_frequencies(RopeSettings("default", theta, dim, 8192))
    ours, _ = inverse_frequencies(RopeSettings("llama3", theta, dim, 8192, scaling))
    if not torch.allclose(plain / ours, torch.from_numpy(factors), rtol=1e-3):
        raise UsageError(f"{source} has rotary factors that are not Llama 3's; they cannot be converted")
    return scaling


def _write_tensors(
    path: Path, reader: Any, architecture: str, config: dict[str, Any], progress: Callable[[float], None]
) -> None:
    """One safetensors file, header first: names and shapes are known before any tensor is dequantised."""
    plan = [(tensor, _names(tensor, architecture)) for tensor in reader.tensors if tensor.name != "rope_freqs.weight"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, names in plan:
        shape = [int(n) for n in reversed(tensor.shape)]
        if len(names) > 1 or len(shape) == 3:
            shape = shape[1:]
        for name in names:
            count = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + count]}
            offset += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    total = sum(int(tensor.n_bytes) for tensor, _ in plan)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, _ in plan:
            for part in _dequantised(tensor, architecture, config):
                _write(file, part)
            before, done = done, done + int(tensor.n_bytes)
            if 100 * before // total != 100 * done // total:
                progress(done / total)


def _names(tensor: Any, architecture: str) -> list[str]:
    """The tensor's names in the Hugging Face checkpoint: several for stacked experts.

    Raises:
        UsageError: a tensor we do not know: leaving it out would give a model that is subtly wrong.
    """
    stem, _, kind = tensor.name.rpartition(".")
    if stem in _TOP:
        return [f"{_TOP[stem]}.{kind}"]
    match = _BLOCK_NAME.fullmatch(tensor.name)
    if match is not None:
        layer, block, kind = match[1], match[2], match[3]
        if block in _EXPERTS:
            return [
                f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[block]}.{kind}"
                for expert in range(int(tensor.shape[2]))
            ]
        known = {**_BLOCK, **_GEMMA_BLOCK} if architecture == "gemma3" else _BLOCK
        if block in known:
            return [f"model.layers.{layer}.{known[block]}.{kind}"]
    raise UsageError(f"GGUF tensor {tensor.name} of architecture {architecture} cannot be converted")


def _dequantised(tensor: Any, architecture: str, config: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensor in bf16, expert by expert where experts are stacked."""
    import gguf

    parts = tensor.data if len(tensor.shape) == 3 else [tensor.data]
    for data in parts:
        values = gguf.dequantize(data, tensor.tensor_type)
        if architecture in ("llama", "mistral") and ".attn_q." in tensor.name:
            values = _unpermute(values, config["num_attention_heads"])
        elif architecture in ("llama", "mistral") and ".attn_k." in tensor.name:
            values = _unpermute(values, config["num_key_value_heads"])
        elif architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            values = values - 1  # llama.cpp stores 1 + weight
        if not values.flags.writeable:
            values = values.copy()  # float32 tensors come as views of the mapped file
        yield torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _unpermute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's pairing of the two halves of each head's rotary dimensions."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    file.write(tensor.contiguous().view(torch.int16).numpy().tobytes())
