"""Phi-3.5-MoE as its authors publish it, and the magnitudes of its positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_run.core.model.rotary import RotaryTable
from ascend_run.core.model.rotary_scaling import rotary_scaling
from ascend_run.plugin_api import ConfigError
from ascend_run.plugins.models.phi3 import Phi3
from ascend_run.plugins.models.phimoe import Phimoe
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from tests.support.family_checks import run_config

LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "short_mscale": 1.25,
    "long_mscale": 1.5,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "hidden_size": 16,
    "input_jitter_noise": 0.01,
    "intermediate_size": 20,
    "lm_head_bias": True,
    "max_position_embeddings": 32,
    "model_type": "phimoe",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "original_max_position_embeddings": 8,
    "rope_scaling": LONGROPE,
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.02,
    "sliding_window": 32,
    "tie_word_embeddings": False,
    "vocab_size": 53,
}
"""The keys of Phi-3.5-MoE-instruct, of another size."""


def test_published_keys_are_read_and_written_with_transformers_class() -> None:
    config = run_config(Phimoe.family, PUBLISHED)
    model = config.model
    assert model.add_qkv_bias is model.add_linear_proj_bias is model.add_output_bias is True
    assert (model.normalization, model.moe_sparsemixer_eps) == ("LayerNorm", 0.02)
    written = config_to_hf(Phimoe.family, config)
    assert written["architectures"] == ["PhimoeForCausalLM"]
    assert written["rope_parameters"]["short_mscale"] == 1.25
    with pytest.raises(ConfigError, match="num_experts_per_tok is 3; only 2 is supported"):
        config_from_hf(Phimoe.family, {**PUBLISHED, "num_experts_per_tok": 3})


@pytest.mark.parametrize(("length", "magnitude", "factor"), [(8, 1.25, 1.5), (9, 1.5, 3.0)])
def test_magnitude_and_angles_follow_the_length(
    length: int, magnitude: float, factor: float
) -> None:
    scaling = rotary_scaling(run_config(Phimoe.family, PUBLISHED))
    table = RotaryTable(4, 100.0, scaling=scaling)(length, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(table[0, 0], torch.full((4,), magnitude, dtype=torch.float64))
    angle = torch.tensor(1.0 / 10.0 / factor, dtype=torch.float64)  # of pair 1 at position 1
    torch.testing.assert_close(table[1, 1, 1], magnitude * angle.sin())


def test_magnitudes_by_length_are_refused_where_transformers_ignores_them() -> None:
    phi3 = {
        **{name: PUBLISHED[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
        **{name: PUBLISHED[name] for name in ("num_hidden_layers", "num_attention_heads")},
        "model_type": "phi3",
        "rope_scaling": LONGROPE,
    }
    with pytest.raises(ConfigError, match=r"unknown key rope_scaling\.long_mscale"):
        config_from_hf(Phi3.family, phi3)
    plain = {**phi3, "rope_scaling": {k: v for k, v in LONGROPE.items() if "mscale" not in k}}
    config = run_config(Phi3.family, plain, rope_scaling_long_mscale=1.5)
    with pytest.raises(ConfigError, match=r"rope_scaling_long_mscale is 1\.5; Phi3ForCausalLM has"):
        config_to_hf(Phi3.family, config)
