"""Quantized checkpoints in the published formats: the logits are those of the weights they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Ranks, runner_for, teacher_forced
from test_parity import PROMPT, reference_run
from tiny_models import edit_config, make_tiny, quantize_tiny

from forebay.engine.kernels.interface import KernelBackend
from forebay.engine.kernels.torch_fallback import TorchBackend
from forebay.engine.model_executor.load_model import inspect, load
from forebay.errors import UsageError

pytestmark = pytest.mark.engine

CASES = [
    ("llama", "int4", False),
    ("llama", "int8", False),
    ("llama", "fp8", False),
    ("mixtral", "int8", False),
    ("qwen3_moe", "fp8", False),
    ("deepseek_v3", "fp8", False),
    ("deepseek_v2", "int4", True),
    ("kimi_k25", "int4", True),
]


@pytest.mark.parametrize(("kind", "scheme", "experts_only"), CASES)
def test_logits_are_those_of_the_weights_they_stand_for(
    kind: str, scheme: str, experts_only: bool, tmp_path: Path, backend: KernelBackend
) -> None:
    folder = make_tiny(kind, tmp_path / kind, dtype=torch.float32)
    quantize_tiny(folder, scheme, experts_only=experts_only)
    tokens, reference = reference_run(folder, torch.float32)
    ours = teacher_forced(runner_for(folder, backend), tokens, PROMPT, chunk=17)
    torch.testing.assert_close(ours, reference, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize(("kind", "scheme"), [("kimi_k25", "int4"), ("qwen3_moe", "int8"), ("deepseek_v3", "fp8")])
def test_split_over_two_ranks_packed_weights_are_cut_where_scales_allow(
    kind: str, scheme: str, tmp_path: Path, backend: KernelBackend
) -> None:
    wide: dict[str, Any] = {"moe_intermediate_size": 256} if scheme == "fp8" else {}
    folder = make_tiny(kind, tmp_path / kind, dtype=torch.float32, **wide)
    quantize_tiny(folder, scheme, experts_only=True)
    tokens, reference = reference_run(folder, torch.float32)
    ranks = Ranks(folder, 2, backend.name)
    try:
        ours = teacher_forced(ranks, tokens, PROMPT, chunk=17)
    finally:
        ranks.close()
    torch.testing.assert_close(ours, reference, rtol=5e-4, atol=5e-4)


def test_an_fp8_block_is_never_cut_in_two(tmp_path: Path) -> None:
    folder = make_tiny("deepseek_v3", tmp_path / "m", dtype=torch.float32)
    quantize_tiny(folder, "fp8", experts_only=True)
    with pytest.raises(UsageError, match="cut through a block of 128"):
        Ranks(folder, 2, "torch")


def test_a_quantized_head_is_the_head(tmp_path: Path, backend: KernelBackend) -> None:
    folder = make_tiny("llama", tmp_path / "m", dtype=torch.float32)
    quantize_tiny(folder, "int4", also=("lm_head.weight",))
    tokens, reference = reference_run(folder, torch.float32)
    ours = teacher_forced(runner_for(folder, backend), tokens, PROMPT, chunk=17)
    torch.testing.assert_close(ours, reference, rtol=5e-4, atol=5e-4)


def test_a_quantized_token_table_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m", dtype=torch.float32)
    quantize_tiny(folder, "int8", also=("model.embed_tokens.weight",))
    with pytest.raises(UsageError, match="embed_tokens is stored quantized"):
        load(inspect(folder), TorchBackend())


def test_only_packed_bytes_are_kept(tmp_path: Path) -> None:
    """INT4 experts take 4 bits a weight and 2 bytes a group of 32, and what is ignored stays as it was."""
    folder = make_tiny("kimi_k25", tmp_path / "m", dtype=torch.bfloat16)
    plain = load(inspect(folder), TorchBackend()).weight_bytes
    quantized = make_tiny("kimi_k25", tmp_path / "q", dtype=torch.float32)
    quantize_tiny(quantized, "int4", experts_only=True)
    packed = load(inspect(quantized, dtype="bfloat16"), TorchBackend()).weight_bytes
    expert_values = 2 * 8 * 3 * 128 * 128  # layers x experts x matrices x a matrix
    assert packed == plain - 2 * expert_values + expert_values // 2 + 2 * expert_values // 32


def _group(config: dict[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    return weights


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda c: c["quantization_config"].update(quant_method="awq"), "awq"),
        (lambda c: _group(c).update(symmetric=False), "4-bit"),
        (lambda c: _group(c).update(group_size=128), "4-bit"),
        (lambda c: _group(c).update(num_bits=3), "3-bit"),
        (lambda c: c.update(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}), "64"),
    ],
)
def test_a_form_we_do_not_have_is_refused_before_any_weight_is_read(
    edit: Callable[[dict[str, Any]], None], named: str, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path / "m", dtype=torch.float32)
    quantize_tiny(folder, "int4")
    (folder / "model.safetensors").unlink()
    edit_config(folder, edit)
    with pytest.raises(UsageError, match=named):
        inspect(folder)
