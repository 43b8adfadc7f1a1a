from __future__ import annotations

from ascend_run.plugins.models.llama import Llama
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from tests.support import family_checks

FAMILY = Llama.family

LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_1_8B = LLAMA_2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


def test_a_model_with_experts_is_no_llama() -> None:
    config = family_checks.run_config(FAMILY, LLAMA_2_7B, num_moe_experts=4)
    (condition,) = Llama.manifest.requires
    assert not condition.holds(config)
    assert condition.holds(family_checks.run_config(FAMILY, LLAMA_2_7B, num_moe_experts=None))


def test_a_published_config_is_understood() -> None:
    values = config_from_hf(FAMILY, LLAMA_2_7B)
    assert values["model.ffn_hidden_size"] == 11008
    assert values["model.rotary_base"] == 10000.0
    assert values["model.kv_channels"] is None
    unscaled = LLAMA_3_1_8B | {"rope_scaling": None}
    assert config_from_hf(FAMILY, unscaled)["model.rotary_base"] == 500000.0


def test_the_scaled_rope_of_llama_3_1_is_understood() -> None:
    values = config_from_hf(FAMILY, LLAMA_3_1_8B)
    assert values["model.rope_scaling_type"] == "llama3"
    assert values["model.rope_scaling_factor"] == 8.0
    assert values["model.rope_scaling_original_max_position_embeddings"] == 8192
