from __future__ import annotations

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.plugins.models.mixtral import Mixtral
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from tests.support import family_checks

FAMILY = Mixtral.family

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"num_moe_experts": None}, "num_moe_experts"),
        ({"num_moe_experts": 1}, "num_moe_experts"),
        ({"moe_router_topk": 1}, "moe_router_topk"),
    ],
)
def test_what_is_no_mixture_is_no_mixtral(changes: dict, fault: str | None) -> None:
    config = family_checks.run_config(FAMILY, MIXTRAL_8X7B, **changes)
    failed = [c.field for c in Mixtral.manifest.requires if not c.holds(config)]
    assert failed == ([f"model.{fault}"] if fault else [])


def test_a_published_config_is_understood() -> None:
    values = config_from_hf(FAMILY, MIXTRAL_8X7B)
    assert values["model.moe_ffn_hidden_size"] == 14336
    assert values["model.num_moe_experts"] == 8
    assert values["model.moe_aux_loss_coeff"] == 0.02
    assert values["model.rotary_base"] == 1e6


@pytest.mark.parametrize(("key", "value"), [("sliding_window", 4096), ("router_jitter_noise", 0.1)])
def test_what_would_be_computed_otherwise_is_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {value}; only"):
        config_from_hf(FAMILY, MIXTRAL_8X7B | {key: value})
