"""Logits and greedy tokens of every architecture against transformers, on tiny checkpoints in the real formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from driving import Ranks, assert_within_rounding, runner_for, teacher_forced
from tiny_models import KINDS, VOCAB, load_reference, make_tiny

from forebay.engine.kernels.interface import KernelBackend

pytestmark = pytest.mark.engine

PROMPT, TOTAL = 40, 56


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint, the reference's tokens on it and its logits before each generated one."""

    folder: Path
    tokens: list[int]
    logits: torch.Tensor


def make_case(kind: str, paths: pytest.TempPathFactory, dtype: torch.dtype) -> Case:
    folder = make_tiny(kind, paths.mktemp(kind), dtype=dtype, decisive=dtype == torch.bfloat16)
    return Case(folder, *reference_run(folder, dtype))


def reference_run(folder: Path, dtype: torch.dtype) -> tuple[list[int], torch.Tensor]:
    """The reference's own greedy tokens after a random prompt, and its logits before each of them."""
    model = load_reference(folder, dtype)
    torch.manual_seed(3)
    ids = torch.randint(4, VOCAB, (1, PROMPT))
    with torch.inference_mode():
        made = model.generate(ids, max_new_tokens=TOTAL - PROMPT, do_sample=False, eos_token_id=VOCAB, pad_token_id=0)
        logits = model(made).logits[0].float()
    return made[0].tolist(), logits[PROMPT - 1 : -1]


@pytest.fixture(scope="module", params=KINDS)
def fp32_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory, torch.float32)


@pytest.fixture(scope="module", params=KINDS)
def bf16_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory, torch.bfloat16)


def test_fp32_logits_are_those_of_transformers(fp32_case: Case, backend: KernelBackend) -> None:
    ours = teacher_forced(runner_for(fp32_case.folder, backend), fp32_case.tokens, PROMPT, chunk=17)
    torch.testing.assert_close(ours, fp32_case.logits, rtol=3e-4, atol=3e-4)


def test_bf16_greedy_tokens_are_those_of_transformers_within_rounding(bf16_case: Case, backend: KernelBackend) -> None:
    ours = teacher_forced(runner_for(bf16_case.folder, backend), bf16_case.tokens, PROMPT, chunk=17)
    assert_within_rounding(ours, bf16_case.logits)
    off = float((ours - bf16_case.logits).abs().median() / bf16_case.logits.std())
    assert off < 0.02, "logits are off by more than bf16 explains"


@pytest.mark.parametrize("tp", [2, 4])
def test_split_over_ranks_the_logits_are_still_those_of_transformers(fp32_case: Case, tp: int) -> None:
    ranks = Ranks(fp32_case.folder, tp, "auto")
    try:
        ours = teacher_forced(ranks, fp32_case.tokens, PROMPT, chunk=17)
    finally:
        ranks.close()
    torch.testing.assert_close(ours, fp32_case.logits, rtol=3e-4, atol=3e-4)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_scalings_give_transformers_logits(rope: str, tmp_path: Path) -> None:
    parameters = {"rope_theta": 10000.0, **ROPES[rope]}
    folder = make_tiny("llama", tmp_path / rope, dtype=torch.float32, rope_parameters=parameters)
    tokens, reference = reference_run(folder, torch.float32)
    ours = teacher_forced(runner_for(folder), tokens, PROMPT, chunk=17)
    torch.testing.assert_close(ours, reference, rtol=2e-4, atol=2e-4)
