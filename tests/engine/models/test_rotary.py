"""Rotary frequencies against transformers' functions, in both forms that a config may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.engine.models.rotary import inverse_frequencies, rope_settings, rope_tables
from forebay.errors import UsageError

pytestmark = pytest.mark.engine

DIM, POSITIONS = 64, 4096
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.2},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("old_form", [False, True])
def test_frequencies_are_transformers(scaling: dict[str, Any], old_form: bool) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 50000.0, **scaling}
    config = LlamaConfig(head_dim=DIM, max_position_embeddings=POSITIONS, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    ours: dict[str, Any] = {"max_position_embeddings": POSITIONS}
    if old_form:
        rest = {key: value for key, value in scaling.items() if key != "rope_type"}
        ours |= {"rope_theta": 50000.0, "rope_scaling": {"type": scaling["rope_type"], **rest}}
    else:
        ours |= {"rope_parameters": parameters}
    frequencies, scale = inverse_frequencies(rope_settings(ours, DIM))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(factor)


def test_tables_are_rounded_once_from_fp32_angles() -> None:
    rope = rope_settings({"rope_theta": 10000.0, "max_position_embeddings": POSITIONS}, DIM)
    cos, sin = rope_tables(rope, 300, torch.bfloat16)
    angles = torch.arange(300).float()[:, None] / 10000.0 ** (torch.arange(0, DIM, 2).float() / DIM)
    assert cos.shape == sin.shape == (300, DIM // 2)
    assert torch.equal(cos, angles.cos().bfloat16()) or (cos - angles.cos()).abs().max() < 2**-8
    assert (sin.float() - angles.sin()).abs().max() < 2**-8


def test_an_unknown_scaling_is_refused_with_those_we_have() -> None:
    with pytest.raises(UsageError, match="longrope") as refused:
        rope_settings({"rope_scaling": {"type": "longrope"}}, DIM)
    assert "yarn" in str(refused.value.fix)


def test_dynamic_scaling_beyond_the_trained_length_is_refused() -> None:
    rope = rope_settings({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128}, DIM)
    rope_tables(rope, 128, torch.float32)
    with pytest.raises(UsageError, match="dynamic rotary scaling"):
        rope_tables(rope, 129, torch.float32)
