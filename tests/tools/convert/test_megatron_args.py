"""The command line in Megatron's files becomes ``[model]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.plugin_api import RunConfig
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.prepare.hugging_face.neutral_fields import neutral_fields
from ascend_run.tools.convert.formats.megatron_args import make_args, model_values
from ascend_run.tools.convert.formats.shard_layout import LayoutOptions
from tests.support.tiny_configs import model_fields, parallel_fields

PLAIN_ARGS = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rope_type": None,
    "rotary_seq_len_interpolation_factor": None,
    "num_experts": None,
    "moe_router_score_function": "softmax",
    "softmax_type": "vanilla",
    "add_bias_linear": False,
}
SPARSE_ARGS = {"num_experts": 4, "moe_router_topk_scaling_factor": None}
BIASES = {f"add_{kind}_bias": True for kind in ("qkv", "linear_proj", "router", "expert")}
LATENT_ARGS = {"multi_latent_attention": True, "kv_channels": 4, "rotary_scaling_factor": 1.0}


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            {
                "rope_scaling_type": "llama3",
                "rope_scaling_factor": 32.0,
                "rope_scaling_low_freq_factor": 1.0,
                "rope_scaling_high_freq_factor": 4.0,
                "rope_scaling_original_max_position_embeddings": 8192,
            },
        ),
        (
            {
                "quick_geglu": True,
                "swiglu": False,
                "activation_func_clamp_value": 7.0,
                "glu_linear_offset": 1.0,
            },
            {
                "activation": "quick_gelu",
                "gated_linear_unit": True,
                "activation_func_clamp_value": 7.0,
                "glu_linear_offset": 1.0,
            },
        ),
        (
            {"rotary_seq_len_interpolation_factor": 4},
            {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        ),
        (
            {
                "rope_scaling_type": "llama3",
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 4096.0,
            },
            {
                "rope_scaling_type": "llama3",
                "rope_scaling_factor": 8.0,
                "rope_scaling_low_freq_factor": 2.0,
                "rope_scaling_high_freq_factor": 3.0,
                "rope_scaling_original_max_position_embeddings": 4096,
            },
        ),
        (
            {
                **SPARSE_ARGS,
                "moe_router_score_function": "sigmoid",
                "moe_router_pre_softmax": True,
                "moe_router_num_groups": 2,
                "moe_router_topk_scaling_factor": 2.5,
            },
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_pre_softmax": True,
                "moe_router_num_groups": 2,
                "moe_router_topk_scaling_factor": 2.5,
            },
        ),
        ({**SPARSE_ARGS, "moe_router_topk_scaling_factor": 1.0}, {"num_moe_experts": 4}),
        (
            {**SPARSE_ARGS, "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
            {
                "num_moe_experts": 4,
                "moe_router_topk": 1,
                "moe_router_score_function": "sigmoid",
            },
        ),
        (
            {**SPARSE_ARGS, "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 2},
            {
                "num_moe_experts": 4,
                "moe_router_topk": 2,
                "moe_router_pre_softmax": True,
            },
        ),
        ({**SPARSE_ARGS, "add_bias_linear": True}, {"add_bias_linear": False, **BIASES}),
        (
            {**SPARSE_ARGS, "add_bias_linear": True, "moe_layer_freq": [0, 1]},
            {**BIASES, "add_mlp_bias": True},
        ),
        ({"add_dense_bias": True}, {"add_linear_proj_bias": True, "add_bias_linear": False}),
        ({"squared_relu": True}, {"activation": "squared_relu"}),
        ({"apply_layernorm_1p": True}, {"layernorm_zero_centered_gamma": True}),
        ({"softmax_type": "learnable"}, {"softmax_type": "learnable"}),
        (LATENT_ARGS, {"rope_type": "yarn", "rotary_scaling_factor": 1.0, "q_lora_rank": None}),
        ({**LATENT_ARGS, "rope_type": "rope"}, {"rope_type": "rope"}),
        ({**LATENT_ARGS, "rope_scaling_type": None}, {"rope_type": "rope"}),
        (
            {**LATENT_ARGS, "rope_scaling_type": "linear", "use_rope_scaling": True},
            {"rope_type": "rope", "rope_scaling_type": "linear", "rope_scaling_factor": 8.0},
        ),
        (
            {
                **LATENT_ARGS,
                "rope_scaling_type": "yarn",
                "rope_scaling_factor": 40.0,
                "rope_scaling_original_max_position_embeddings": 4096,
                "rope_scaling_mscale_all_dim": 0.707,
                "beta_fast": 32,
            },
            {
                "rope_type": "yarn",
                "rotary_scaling_factor": 40.0,
                "original_max_position_embeddings": 4096,
                "mscale_all_dim": 0.707,
                "beta_fast": 32,
            },
        ),
    ],
)
def test_args_that_change_the_model_are_read(
    args: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Beside what the plain options give; neutral values give nothing."""
    plain = model_values(PLAIN_ARGS, "here")
    assert plain["model.num_layers"] == 2
    assert not any(name.startswith(("model.rope", "model.moe", "model.soft")) for name in plain)
    got = model_values({**PLAIN_ARGS, **args}, "here")
    assert got.items() >= {f"model.{name}": value for name, value in values.items()}.items()
    for part in ("rope_", "rotary_scaling"):
        named = {name for name in got if part in name}
        assert named == {f"model.{name}" for name in values if part in name}
    assert "model.kv_channels" not in got


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"enable_gpt_oss": True}, "enable_gpt_oss is true: the numbers of its yarn are not"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type is 'yarn': the numbers"),
        ({"rope_scaling_type": "plm"}, "rope_scaling_type is 'plm'"),
        ({"rope_scaling_type": "llama3"}, "without low_freq_factor"),
        ({"rope_scaling_type": "longrope", "short_factor": "1,2"}, "'1,2', not a list"),
        ({**LATENT_ARGS, "rope_scaling_type": "yarn"}, "without rope_scaling_original_max"),
        (
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2},
            "in more than one way: llama3, linear",
        ),
    ],
)
def test_args_that_cannot_be_read_need_a_config(args: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match="here has options that change the model") as refusal:
        model_values({**PLAIN_ARGS, **args}, "here")
    assert any(problem in one for one in refusal.value.problems)


def test_every_field_that_changes_a_model_is_in_the_args() -> None:
    """Each off its neutral value, of a model that can have it."""
    kinds = {int: 2, float: 0.5, str: "learnable", tuple: (2, 3)}
    apart = {"rope_scaling_type": "linear", "moe_layer_freq": [1, 0], "window_size": (4, 0)}
    for name, neutral in neutral_fields().items():
        other = not neutral if isinstance(neutral, bool) else kinds.get(type(neutral), 4)
        value = apart.get(name, other)
        fields: dict[str, object] = {"vocab_size": 16, "rope_scaling_factor": 2.0, name: value}
        if name.startswith("moe_"):
            fields["num_moe_experts"] = 4
        if name.endswith("_mscale"):
            lists = {f"rope_scaling_{which}_factor": (1.0,) for which in ("short", "long")}
            fields |= {"rope_scaling_type": "longrope", **lists}
        config = RunConfig(model=model_fields(fields), parallel=parallel_fields())
        args = vars(make_args(config, LayoutOptions(), padded_rows=16))
        found = model_values(args, "here").get(f"model.{name}")
        assert (tuple(found) if isinstance(found, list) else found) == (
            tuple(value) if isinstance(value, list) else value
        ), name
        assert found != neutral, name
