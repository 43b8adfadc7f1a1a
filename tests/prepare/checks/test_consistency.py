from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import Claim
from ascend_run.prepare.checks.consistency import consistency_problems
from tests.support.tiny_configs import config_with


def problems_of(**values: Any) -> list[str]:
    """Of a run whose router is a plugin's, and whose linears have no biases."""
    config = config_with(**{"model__add_bias_linear": False, **values})
    return consistency_problems(config, {Claim.ROUTER})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"model__qk_layernorm": True, "model__qk_l2_norm": True},
            (
                "model.qk_layernorm=true and model.qk_l2_norm=true both normalize queries and keys;"
                " leave one of them out"
            ),
        ),
        (
            {"model__mtp_num_layers": 64, "data__seq_length": 64},
            "model.mtp_num_layers=64 must be below data.seq_length=64",
        ),
        (
            {
                "model__mtp_num_layers": 1,
                "model__position_embedding_type": "learned_absolute",
                "parallel__pipeline_model_parallel_size": 2,
            },
            (
                "model.mtp_num_layers=1 does not go with "
                "model.position_embedding_type=learned_absolute with "
                "parallel.pipeline_model_parallel_size=2; leave one of them out"
            ),
        ),
        (
            {
                "model__mtp_num_layers": 1,
                "model__pipeline_model_parallel_layout": "Et|tL",
                "parallel__pipeline_model_parallel_size": 2,
            },
            (
                "model.mtp_num_layers=1 does not go with model.pipeline_model_parallel_layout with "
                "parallel.pipeline_model_parallel_size=2; leave one of them out"
            ),
        ),
        (
            {"model__window_attn_skip_freq": 2},
            "model.window_attn_skip_freq=2 needs model.window_size",
        ),
        (
            {"model__window_size": [4, 0], "model__window_attn_skip_freq": [1, 0, 1]},
            (
                "model.window_attn_skip_freq has 3 entries; expected one for each of "
                "model.num_layers=2"
            ),
        ),
        (
            {"model__window_size": [4, 0], "model__window_attn_skip_freq": 0},
            "model.window_attn_skip_freq=0: expected at least 1, every so many layers",
        ),
        (
            {"model__rotary_local_base": 100.0},
            (
                "model.rotary_local_base=100.0 needs model.window_size and "
                "model.position_embedding_type=rope, without model.multi_latent_attention"
            ),
        ),
        (
            {"model__hidden_size": 66},
            (
                "model.hidden_size=66 is not a multiple of model.num_attention_heads=4; use "
                "64 or 68, "
                "or set model.kv_channels"
            ),
        ),
        (
            {"model__num_query_groups": 3},
            (
                "model.num_attention_heads=4 is not a multiple of model.num_query_groups=3; "
                "use 1, 2 "
                "or 4 groups"
            ),
        ),
        (
            {"model__rotary_percent": 0.2},
            (
                "RoPE rotates pairs of entries, but a head's width of 16 (model.hidden_size=64 "
                "over model.num_attention_heads=4) times model.rotary_percent=0.2 is odd"
            ),
        ),
        (
            {"model__moe_ffn_hidden_size": 8},
            "model.moe_ffn_hidden_size=8 needs model.num_moe_experts",
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_router_topk": 5},
            "model.moe_router_topk=5 is more than model.num_moe_experts=4; use at most 4",
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_layer_freq": [1, 0, 1]},
            "model.moe_layer_freq has 3 entries; expected one for each of model.num_layers=2",
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_layer_freq": 0},
            "model.moe_layer_freq=0: expected at least 1, every so many layers",
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_aux_loss_coeff": [0.1]},
            (
                "model.moe_router_load_balancing_type='aux_loss' and "
                "model.moe_aux_loss_coeff=[0.1] "
                "must be two lists of one length, or two single values"
            ),
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_router_load_balancing_type": "evenly"},
            (
                "model.moe_router_load_balancing_type='evenly': expected one of aux_loss, "
                "seq_aux_loss, global_aux_loss, sinkhorn, none"
            ),
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_router_topk": 1},
            (
                "model.moe_router_topk=1 leaves a softmax over one value, which has no "
                "gradient; set "
                "model.moe_router_pre_softmax=true"
            ),
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_router_enable_expert_bias": True},
            (
                "model.moe_router_enable_expert_bias=true needs "
                "model.moe_router_score_function=sigmoid"
            ),
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_router_group_topk": 1},
            "model.moe_router_group_topk=1 needs model.moe_router_num_groups",
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_router_num_groups": 3},
            (
                "model.num_moe_experts=4 cannot be split over "
                "model.moe_router_num_groups=3; use 1, 2 "
                "or 4"
            ),
        ),
        (
            {
                "model__num_moe_experts": 4,
                "model__moe_router_num_groups": 2,
                "model__moe_router_group_topk": 3,
            },
            "model.moe_router_group_topk=3 is more than model.moe_router_num_groups=2",
        ),
        (
            {
                "model__num_moe_experts": 4,
                "model__moe_router_topk": 3,
                "model__moe_router_num_groups": 2,
                "model__moe_router_group_topk": 1,
            },
            (
                "model.moe_router_topk=3 is more than the experts of "
                "model.moe_router_group_topk=1 of 2 groups"
            ),
        ),
        (
            {"model__recompute_granularity": "full", "model__recompute_method": "block"},
            "model.recompute_granularity='full' needs model.recompute_num_layers",
        ),
        (
            {
                "model__recompute_granularity": "selective",
                "model__recompute_modules": ["mlp", "layernorm"],
            },
            (
                "model.recompute_modules names 'layernorm': Megatron's recomputation of it "
                "needs Transformer Engine, which is not used; leave it out, or use core_attn, mlp, "
                "moe or shared_experts"
            ),
        ),
        (
            {"model__recompute_granularity": "selective", "model__recompute_num_layers": 1},
            (
                "model.recompute_num_layers=1 does not go with "
                "model.recompute_granularity='selective', which takes every layer; leave it out"
            ),
        ),
        (
            {
                "parallel__sequence_parallel": True,
                "model__distribute_saved_activations": True,
            },
            (
                "model.distribute_saved_activations=true does not go with "
                "parallel.sequence_parallel=true; leave it out"
            ),
        ),
        (
            {"optimizer__lr_warmup_iters": 100},
            (
                "optimizer.lr_warmup_iters=100 must be below train.train_iters=100, or the "
                "learning "
                "rate never decays"
            ),
        ),
        (
            {"optimizer__lr_warmup_iters": 9, "optimizer__lr_decay_iters": 8},
            (
                "optimizer.lr_warmup_iters=9 must be below optimizer.lr_decay_iters=8, or the "
                "learning rate never decays"
            ),
        ),
        (
            {"optimizer__lr_decay_iters": 0},
            "optimizer.lr_decay_iters=0 must be above 0",
        ),
        (
            {"optimizer__min_lr": 1},
            "optimizer.min_lr=1.0 is above optimizer.lr=0.0003",
        ),
        (
            {"optimizer__lr_decay_style": "WSD"},
            "optimizer.lr_decay_style='WSD' needs optimizer.lr_wsd_decay_iters",
        ),
        (
            {"optimizer__lr_decay_style": "WSD", "optimizer__lr_wsd_decay_iters": 101},
            (
                "optimizer.lr_wsd_decay_iters=101 must be above 0 and fit between "
                "optimizer.lr_warmup_iters=0 and train.train_iters=100"
            ),
        ),
        (
            {"optimizer__lr_wsd_decay_iters": 10},
            "optimizer.lr_wsd_decay_iters=10 needs optimizer.lr_decay_style='WSD', not 'cosine'",
        ),
        (
            {"optimizer__loss_scale": 2},
            "optimizer.loss_scale=2.0 needs train.precision='fp16', not 'bf16'",
        ),
        (
            {"optimizer__loss_scale": 0, "train__precision": "fp16"},
            "optimizer.loss_scale=0.0 must be above 0",
        ),
        (
            {"optimizer__min_loss_scale": 4, "optimizer__initial_loss_scale": 2},
            "optimizer.min_loss_scale=4.0 is above optimizer.initial_loss_scale=2.0",
        ),
        (
            {"ddp__overlap_param_gather": True},
            (
                "ddp.overlap_param_gather=true needs ddp.use_distributed_optimizer=true and "
                "ddp.overlap_grad_reduce=true"
            ),
        ),
        ({"ddp__bucket_size": 5}, "ddp.bucket_size=5 needs ddp.overlap_grad_reduce=true"),
        (
            {"model__max_position_embeddings": 512},
            "data.seq_length=1024 is more than model.max_position_embeddings=512; use at most 512",
        ),
        (
            {"data__train": "a,b", "data__train_weights": [1.0]},
            (
                "data.train_weights has 1 weights for 2 prefixes in data.train; give one "
                "for each, or "
                "none"
            ),
        ),
        (
            {"data__train": "a", "data__train_weights": [-1.0]},
            "data.train_weights=[-1.0] must be above 0; leave a dataset out to give it no share",
        ),
        (
            {"data__train": "a,b", "data__train_weights": [1.0, 0.0]},
            (
                "data.train_weights=[1.0, 0.0] must be above 0; leave a dataset out to give it no "
                "share"
            ),
        ),
        ({"checkpoint__step": -1}, "checkpoint.step=-1 must not be negative"),
    ],
)
def test_a_contradiction_is_reported_with_valid_values(
    values: dict[str, Any], problem: str
) -> None:
    assert problems_of(**values) == [problem]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model__hidden_size": 66, "model__kv_channels": 16},
        {"model__num_query_groups": 2},
        {"model__num_moe_experts": 4, "model__moe_layer_freq": [1, 0]},
        {"model__num_moe_experts": 4, "model__moe_router_topk": 4},
        {
            "model__num_moe_experts": 4,
            "model__moe_router_topk": 1,
            "model__moe_router_pre_softmax": True,
        },
        {
            "model__num_moe_experts": 4,
            "model__moe_router_load_balancing_type": '["aux_loss", "seq_aux_loss"]',
            "model__moe_aux_loss_coeff": [0.1, 0.2],
        },
        {"optimizer__lr_warmup_iters": 99},
        {"optimizer__lr_decay_style": "WSD", "optimizer__lr_wsd_decay_iters": 100},
        {"train__train_iters": 0},
        {"optimizer__loss_scale": 2, "train__precision": "fp16"},
        {"model__max_position_embeddings": 1024},
        {"data__train": "a,b", "data__train_weights": [0.5, 1]},
    ],
)
def test_what_fits_together_is_taken(values: dict[str, Any]) -> None:
    assert problems_of(**values) == []


def test_a_derived_width_is_not_named_as_an_option() -> None:
    """One cause, one sentence: of heads that do not divide, no pairs are spoken of."""
    (problem,) = consistency_problems(config_with(model__num_attention_heads=3))
    assert "model.hidden_size=64 is not a multiple of model.num_attention_heads=3" in problem

    (problem,) = consistency_problems(
        config_with(model__hidden_size=42, model__num_attention_heads=2)
    )
    assert "a head's width of 21 (model.hidden_size=42 over model.num_attention_heads=2)" in problem

    (problem,) = consistency_problems(config_with(model__kv_channels=21))
    assert "but model.kv_channels=21 times" in problem


def test_contradictions_are_reported_together() -> None:
    config = config_with(
        model__hidden_size=66, optimizer__lr_decay_style="WSD", model__max_position_embeddings=1
    )
    assert len(consistency_problems(config)) == 3


_BUILT_IN = {"model__add_bias_linear": False, "model__num_moe_experts": 4}


@pytest.mark.parametrize(
    ("values", "claims", "sentence"),
    [
        (
            {"model__moe_router_load_balancing_type": "global_aux_loss"},
            {Claim.ROUTER},
            "model.moe_router_load_balancing_type='global_aux_loss' is not served by the built-in",
        ),
        (
            {"model__moe_router_load_balancing_type": "no_such"},
            set(),
            "model.moe_router_load_balancing_type='no_such' is not served by the built-in",
        ),
        (
            {"model__moe_enable_routing_replay": True},
            {Claim.ROUTER},
            "is not served by the built-in router: nothing here records a routing to replay; leave",
        ),
        (
            {"model__moe_expert_capacity_factor": 0.0},
            {Claim.ROUTER},
            "model.moe_expert_capacity_factor=0.0 drops every token; use a positive number",
        ),
        (
            {"model__moe_pad_expert_input_to_capacity": True},
            {Claim.ROUTER},
            "model.moe_token_drop_policy need model.moe_expert_capacity_factor",
        ),
        (
            {"model__moe_token_drop_policy": "position"},
            {Claim.ROUTER},
            "model.moe_token_drop_policy need model.moe_expert_capacity_factor",
        ),
        (
            {
                "model__moe_expert_capacity_factor": 2.0,
                "model__moe_pad_expert_input_to_capacity": True,
            },
            {Claim.ROUTER},
            "model.moe_expert_capacity_factor=2.0 pads every expert to all tokens; use less than 2",
        ),
        (
            {
                "model__moe_expert_capacity_factor": 1.5,
                "model__moe_router_load_balancing_type": "sinkhorn",
                "model__moe_router_pre_softmax": True,
            },
            {Claim.ROUTER},
            "'sinkhorn' does not go with model.moe_expert_capacity_factor=1.5; leave one of them",
        ),
        (
            {"model__add_bias_linear": True, "model__moe_shared_expert_intermediate_size": 8},
            set(),
            "shared experts have no biases; set both to false",
        ),
        ({"model__add_mlp_bias": True}, set(), "model.add_mlp_bias=true is of dense layers"),
        (
            {"model__add_expert_bias": True, "parallel__expert_tensor_parallel_size": 2},
            set(),
            "biases of experts with parallel.expert_tensor_parallel_size=2 are not supported",
        ),
        (
            {"model__num_moe_experts": "none", "model__add_router_bias": True},
            set(),
            "model.add_router_bias=true needs experts; set model.num_moe_experts",
        ),
        (
            {"model__activation_func_clamp_value": 7.0, "model__gated_linear_unit": False},
            set(),
            "model.activation_func_clamp_value=7.0 needs model.gated_linear_unit=true",
        ),
        (
            {
                "model__gated_linear_unit": True,
                "model__glu_linear_offset": 1.0,
                "model__moe_shared_expert_overlap": True,
            },
            set(),
            "model.glu_linear_offset=1.0 is ignored with model.moe_shared_expert_overlap=true",
        ),
        (
            {"model__quick_gelu_alpha": 1.5},
            set(),
            "model.quick_gelu_alpha=1.5 needs model.activation=quick_gelu",
        ),
    ],
)
def test_unsupported_options_are_rejected_unless_a_plugin_owns_the_seam(
    values: dict[str, Any], claims: set[Claim], sentence: str
) -> None:
    config = config_with(**{**_BUILT_IN, **values})
    (problem,) = consistency_problems(config)
    assert sentence in problem
    if claims:
        assert consistency_problems(config, claims) == []


def test_sparse_mixer_needs_the_built_in_router_and_a_softmax() -> None:
    eps = {**_BUILT_IN, "model__moe_sparsemixer_eps": 0.01}
    assert consistency_problems(config_with(**eps)) == []
    (problem,) = consistency_problems(config_with(**eps), {Claim.ROUTER})
    assert "model.moe_sparsemixer_eps=0.01 is of the built-in router" in problem
    (problem,) = consistency_problems(
        config_with(**eps, model__moe_router_score_function="sigmoid")
    )
    assert "model.moe_sparsemixer_eps=0.01 needs model.moe_router_score_function=softmax" in problem
    (problem,) = consistency_problems(config_with(model__moe_sparsemixer_eps=0.01))
    assert "model.moe_sparsemixer_eps=0.01 needs experts" in problem
    (problem,) = consistency_problems(
        config_with(**eps, model__moe_router_force_load_balancing=True)
    )
    assert "model.moe_sparsemixer_eps=0.01 selects experts itself" in problem
    (problem,) = consistency_problems(
        config_with(**_BUILT_IN, model__moe_sparsemixer_sampling=True)
    )
    assert "model.moe_sparsemixer_sampling=true needs model.moe_sparsemixer_eps" in problem


_SINKHORN = {
    **_BUILT_IN,
    "model__moe_router_load_balancing_type": "sinkhorn",
    "model__moe_router_pre_softmax": True,
}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model__moe_aux_loss_coeff": 0.1}, "model.moe_aux_loss_coeff=0.1; leave one of them"),
        ({"model__moe_router_num_groups": 2}, "model.moe_router_num_groups=2; leave one of them"),
        (
            {"model__moe_router_pre_softmax": False},
            "set model.moe_router_score_function=softmax and model.moe_router_pre_softmax=true",
        ),
        (
            {"model__moe_router_score_function": "sigmoid"},
            "set model.moe_router_score_function=softmax and model.moe_router_pre_softmax=true",
        ),
        (
            {"model__moe_router_topk": 1},
            "with model.moe_router_topk=1 set model.moe_router_score_function=sigmoid",
        ),
    ],
)
def test_sinkhorn_needs_the_weights_that_megatron_has_with_it(
    values: dict[str, Any], sentence: str
) -> None:
    assert consistency_problems(config_with(**_SINKHORN)) == []
    (problem,) = consistency_problems(config_with(**{**_SINKHORN, **values}))
    assert sentence in problem
    assert consistency_problems(config_with(**{**_SINKHORN, **values}), {Claim.ROUTER}) == []
