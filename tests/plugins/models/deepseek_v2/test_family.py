from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.plugins.models.deepseek_v2 import DeepseekV2
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from tests.support import family_checks

FAMILY = DeepseekV2.family

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def test_another_attention_is_no_deepseek() -> None:
    config = family_checks.run_config(FAMILY, V2_LITE)
    plain = family_checks.run_config(FAMILY, V2_LITE, multi_latent_attention=False)
    (condition,) = DeepseekV2.manifest.requires
    assert (condition.holds(config), condition.holds(plain)) == (True, False)


def test_a_published_config_is_understood_and_written_again() -> None:
    values = config_from_hf(FAMILY, V2_LITE)
    assert values["model.moe_layer_freq"] == [0, *[1] * 26]
    assert values["model.moe_shared_expert_intermediate_size"] == 2816
    assert values["model.q_lora_rank"] is None
    assert (values["model.qk_head_dim"], values["model.qk_pos_emb_head_dim"]) == (128, 64)
    assert values["model.rope_type"] == "yarn"
    assert values["model.rotary_scaling_factor"] == 40
    assert values["model.mscale"] == values["model.mscale_all_dim"] == 0.707
    written = config_to_hf(FAMILY, family_checks.run_config(FAMILY, V2_LITE))
    kept = V2_LITE.keys() - FAMILY.ignored - {"rope_scaling", "topk_group"}  # of no effect here
    assert {name: written[name] for name in kept} == {name: V2_LITE[name] for name in kept}
    given = {k: v for k, v in V2_LITE["rope_scaling"].items() if k != "type"}
    assert given.items() <= written["rope_scaling"].items()


def with_rope(**changes: Any) -> dict[str, Any]:
    rope = {k: v for k, v in (V2_LITE["rope_scaling"] | changes).items() if v != "missing"}
    return V2_LITE | {"rope_scaling": rope}


@pytest.mark.parametrize(
    ("config_json", "message"),
    [
        (V2_LITE | {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': expected greedy, or"),
        (V2_LITE | {"first_k_dense_replace": -1}, "expected a whole number >= 0"),
        (with_rope(type="linear"), "rope_type is 'linear'|unknown key"),
        (with_rope(mscale="missing"), "mscale is missing beside mscale_all_dim"),
        (with_rope(factor="missing"), "factor is missing"),
        (with_rope(attention_factor=1.2), "attention_factor is not supported here"),
        (with_rope(truncate=False), "truncate is false"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    config_json: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf(FAMILY, config_json)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": (1, 0, *[1] * 25)}, "only the first layers can be without experts"),
        ({"moe_shared_expert_intermediate_size": 1409}, "expected a multiple of 1408"),
        ({"mscale_all_dim": 0.0}, "model.mscale is 0.707; without"),
        ({"mscale": 0.0}, "model.mscale is 0.0; transformers"),
        ({"num_moe_experts": None}, "num_moe_experts is None"),
        ({"multi_latent_attention": False}, "multi_latent_attention is False"),
    ],
)
def test_what_transformers_has_not_is_not_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_to_hf(FAMILY, family_checks.run_config(FAMILY, V2_LITE, **changes))
