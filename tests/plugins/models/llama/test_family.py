from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Claim
from ascend_run.plugin_api.implementations import claims_of
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


@pytest.fixture(params=["grouped", "tied", "wide-heads"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a random tiny model by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    changes = {
        "grouped": {"num_key_value_heads": 2},
        "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "wide-heads": {"num_key_value_heads": 1, "head_dim": 6},
    }[request.param]
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        **changes,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    return tmp_path / "theirs"


def test_the_plugin_returns_the_family_and_owns_the_seam() -> None:
    plugin = Llama()
    assert Hooks([plugin]).require("ascend_model_family") is FAMILY
    assert plugin.manifest.name == FAMILY.model_type == "llama"
    assert claims_of(plugin) == (Claim.MODEL_FAMILY,)


def test_a_model_with_experts_is_no_llama() -> None:
    config = family_checks.run_config(FAMILY, LLAMA_2_7B, num_moe_experts=4)
    (condition,) = Llama.manifest.requires
    assert not condition.holds(config)
    assert condition.holds(family_checks.run_config(FAMILY, LLAMA_2_7B, num_moe_experts=None))


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, ascend_run.plugins.models.llama; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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


def test_every_key_is_named_once() -> None:
    family_checks.check_keys_are_named_once(FAMILY)


def test_a_missing_key_means_what_it_means_to_transformers() -> None:
    from transformers import LlamaConfig

    family_checks.check_transformers_defaults(FAMILY, LlamaConfig)


def test_transformers_reads_our_config_as_its_own(folder: Path) -> None:
    family_checks.check_config_round_trip(FAMILY, folder)


def test_weights_go_through_our_parameters_and_back_bit_for_bit(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    groups, width = config.num_key_value_heads, config.head_dim
    shapes = {
        "embedding.word_embeddings.weight": (64, 16),
        "decoder.final_layernorm.weight": (16,),
    }
    if not config.tie_word_embeddings:
        shapes["output_layer.weight"] = (64, 16)
    for layer in range(2):
        at = f"decoder.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (16,),
            f"{at}.self_attention.linear_qkv.weight": ((4 + 2 * groups) * width, 16),
            f"{at}.self_attention.linear_proj.weight": (16, 4 * width),
            f"{at}.pre_mlp_layernorm.weight": (16,),
            f"{at}.mlp.linear_fc1.weight": (40, 16),
            f"{at}.mlp.linear_fc2.weight": (16, 20),
        }
    family_checks.check_weights_round_trip(FAMILY, folder, shapes, tmp_path)
