"""The published layer of multi-token prediction: its tensors, and its key in config.json."""

from __future__ import annotations

from typing import Any

from ascend_run.core.hugging_face.parameter_rows import mtp_copies, parameter_sources
from ascend_run.plugin_api import RunConfig
from ascend_run.plugins.models.deepseek_v3 import DeepseekV3
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from tests.support.tiny_configs import model_fields, parallel_fields

FAMILY = DeepseekV3.family
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 3,
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PUBLISHED = {
    *("embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight"),
    *("shared_head.norm.weight", "shared_head.head.weight"),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *("self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj.weight"),
    *("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_a_layernorm.weight"),
    *("self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"),
    *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    *(f"mlp.experts.{expert}.{name}.weight" for expert in range(8) for name in PROJECTIONS),
    *(f"mlp.shared_experts.{name}.weight" for name in PROJECTIONS),
}
"""Names in model.safetensors.index.json of deepseek-ai/DeepSeek-V3 after ``model.layers.61.``."""


def run_config(depths: int | None) -> RunConfig:
    read = config_from_hf(FAMILY, {**CONFIG, "num_nextn_predict_layers": 1})
    values = {**FAMILY.defaults, **read}
    fields = {name.removeprefix("model."): value for name, value in values.items()}
    assert "mtp_num_layers" not in fields  # folders of transformers have the key alone
    model = model_fields({**fields, "mtp_num_layers": depths})
    return RunConfig(model=model, parallel=parallel_fields())


def test_the_number_of_depths_is_written_to_config_json() -> None:
    assert config_to_hf(FAMILY, run_config(2))["num_nextn_predict_layers"] == 2
    for none in (None, 0):
        assert "num_nextn_predict_layers" not in config_to_hf(FAMILY, run_config(none))


def test_a_depth_has_the_published_tensors() -> None:
    config = run_config(1)
    sources = parameter_sources(FAMILY, config)
    names = {*mtp_copies(FAMILY, config)}
    names |= {name for source in sources.values() for name in source.hf_names}
    before = "model.layers.4."
    found = {name.removeprefix(before) for name in names if name.startswith(before)}
    assert found == PUBLISHED
    bias = sources["mtp.layers.0.transformer_layer.mlp.router.expert_bias"]
    assert bias.hf_names == (f"{before}mlp.gate.e_score_correction_bias",)
