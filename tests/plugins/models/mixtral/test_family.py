from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Claim, ConfigError
from ascend_run.plugin_api.implementations import claims_of
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


@pytest.fixture(params=["grouped", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a random tiny model by transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=32,
        tie_word_embeddings=request.param == "tied",
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    return tmp_path / "theirs"


def test_the_plugin_returns_the_family_and_owns_the_seam() -> None:
    plugin = Mixtral()
    assert Hooks([plugin]).require("ascend_model_family") is FAMILY
    assert plugin.manifest.name == FAMILY.model_type == "mixtral"
    assert claims_of(plugin) == (Claim.MODEL_FAMILY,)


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


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, ascend_run.plugins.models.mixtral; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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


def test_every_key_is_named_once() -> None:
    family_checks.check_keys_are_named_once(FAMILY)


def test_a_missing_key_means_what_it_means_to_transformers() -> None:
    from transformers import MixtralConfig

    family_checks.check_transformers_defaults(FAMILY, MixtralConfig)


def test_transformers_reads_our_config_as_its_own(folder: Path) -> None:
    family_checks.check_config_round_trip(FAMILY, folder)


def test_weights_go_through_our_parameters_and_back_bit_for_bit(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    shapes = {
        "embedding.word_embeddings.weight": (64, 16),
        "decoder.final_layernorm.weight": (16,),
    }
    if not AutoConfig.from_pretrained(folder).tie_word_embeddings:
        shapes["output_layer.weight"] = (64, 16)
    for layer in range(2):
        at = f"decoder.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (16,),
            f"{at}.self_attention.linear_qkv.weight": (32, 16),
            f"{at}.self_attention.linear_proj.weight": (16, 16),
            f"{at}.pre_mlp_layernorm.weight": (16,),
            f"{at}.mlp.router.weight": (3, 16),
            f"{at}.mlp.experts.fc1": (3, 40, 16),
            f"{at}.mlp.experts.fc2": (3, 16, 20),
        }
    family_checks.check_weights_round_trip(FAMILY, folder, shapes, tmp_path)
