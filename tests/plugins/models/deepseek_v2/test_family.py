from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Claim, ConfigError
from ascend_run.plugin_api.implementations import claims_of
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


@pytest.fixture(params=["latent queries", "plain queries"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a random tiny model by transformers."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    latent = request.param == "latent queries"
    given = {name: value for name, value in V2_LITE["rope_scaling"].items() if name != "type"}
    yarn = {"rope_theta": 50.0, **given, "rope_type": "yarn"}
    config = DeepseekV2Config(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=20,
        moe_intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=4,
        first_k_dense_replace=1,
        n_routed_experts=3,
        num_experts_per_tok=2,
        n_shared_experts=2,
        q_lora_rank=6 if latent else None,
        kv_lora_rank=8,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=3,
        max_position_embeddings=163840,
        rope_parameters=yarn if latent else {"rope_type": "default", "rope_theta": 50.0},
    )
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    return tmp_path / "theirs"


def test_the_plugin_returns_the_family_and_owns_the_seam() -> None:
    plugin = DeepseekV2()
    assert Hooks([plugin]).require("ascend_model_family") is FAMILY
    assert plugin.manifest.name == FAMILY.model_type == "deepseek_v2"
    assert claims_of(plugin) == (Claim.MODEL_FAMILY,)


def test_another_attention_is_no_deepseek() -> None:
    config = family_checks.run_config(FAMILY, V2_LITE)
    plain = family_checks.run_config(FAMILY, V2_LITE, multi_latent_attention=False)
    (condition,) = DeepseekV2.manifest.requires
    assert (condition.holds(config), condition.holds(plain)) == (True, False)


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, ascend_run.plugins.models.deepseek_v2; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
    kept = V2_LITE.keys() - FAMILY.ignored - {"rope_scaling"}
    assert {name: written[name] for name in kept} == {name: V2_LITE[name] for name in kept}
    given = {k: v for k, v in V2_LITE["rope_scaling"].items() if k != "type"}
    assert given.items() <= written["rope_scaling"].items()


def with_rope(**changes: Any) -> dict[str, Any]:
    rope = {k: v for k, v in (V2_LITE["rope_scaling"] | changes).items() if v != "missing"}
    return V2_LITE | {"rope_scaling": rope}


@pytest.mark.parametrize(
    ("config_json", "message"),
    [
        (V2_LITE | {"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited"),
        (V2_LITE | {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; only 1e-06"),
        (V2_LITE | {"first_k_dense_replace": -1}, "expected a whole number above 0"),
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


def test_every_key_is_named_once() -> None:
    family_checks.check_keys_are_named_once(FAMILY)


def test_a_missing_key_means_what_it_means_to_transformers() -> None:
    from transformers import DeepseekV2Config

    published = ("scoring_func", "moe_layer_freq")  # keys of the authors' own class
    known = attrs.evolve(
        FAMILY, fixed={k: v for k, v in FAMILY.fixed.items() if k not in published}
    )
    required = family_checks.LLAMA_LIKE | {"num_experts_per_tok"}
    family_checks.check_transformers_defaults(known, DeepseekV2Config, required)


def test_transformers_reads_our_config_as_its_own(folder: Path) -> None:
    family_checks.check_config_round_trip(FAMILY, folder)


def test_weights_go_through_our_parameters_and_back_bit_for_bit(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    latent = AutoConfig.from_pretrained(folder).q_lora_rank is not None
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (64, 16),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (64, 16),
    }
    for layer in range(2):
        at = f"decoder.layers.{layer}"
        attention = f"{at}.self_attention"
        shapes |= {
            f"{at}.input_layernorm.weight": (16,),
            f"{at}.pre_mlp_layernorm.weight": (16,),
            f"{attention}.linear_kv_down_proj.weight": (12, 16),
            f"{attention}.kv_layernorm.weight": (8,),
            f"{attention}.linear_kv_up_proj.weight": (32, 8),
            f"{attention}.linear_proj.weight": (16, 12),
        }
        shapes |= (
            {
                f"{attention}.linear_q_down_proj.weight": (6, 16),
                f"{attention}.q_layernorm.weight": (6,),
                f"{attention}.linear_q_up_proj.weight": (36, 6),
            }
            if latent
            else {f"{attention}.linear_q_proj.weight": (36, 16)}
        )
    shapes |= {
        "decoder.layers.0.mlp.linear_fc1.weight": (40, 16),
        "decoder.layers.0.mlp.linear_fc2.weight": (16, 20),
        "decoder.layers.1.mlp.router.weight": (3, 16),
        "decoder.layers.1.mlp.experts.fc1": (3, 20, 16),
        "decoder.layers.1.mlp.experts.fc2": (3, 16, 10),
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (40, 16),
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight": (16, 20),
    }
    family_checks.check_weights_round_trip(FAMILY, folder, shapes, tmp_path)
