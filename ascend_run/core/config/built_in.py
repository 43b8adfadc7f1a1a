"""Options that the built-in modules do not support.

Planning checks the config; the modules check what they are built with, since a plugin's
``ascend_configure`` may have changed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from ascend_run.plugin_api.error_text import show
from ascend_run.types.declarations import Claim

from .linear_biases import linear_biases

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ascend_run.types.config import FieldSection, RunConfig

QUICK_GELU_ALPHA: Final = 1.702
"""Megatron's."""
_ROUTER_NOT_DONE: Final = {
    "moe_enable_routing_replay": "nothing here records a routing to replay",
    "moe_router_topk_limited_devices": "set model.moe_router_num_groups in its place",
}
"""Options that Megatron's router supports and the built-in one does not, with the reason."""
_BALANCING: Final = ("aux_loss", "seq_aux_loss", "sinkhorn", "none")


def built_in_problems(config: RunConfig, claimed: Collection[Claim]) -> Iterator[str]:
    """Yield a message for each option that the built-in modules would ignore.

    Args:
        claimed: Seams owned by plugins, whose modules check their own options.
    """
    model = config.model
    base, kind = model.rotary_local_base, model.position_embedding_type
    if base and (not model.window_size or kind != "rope" or model.multi_latent_attention):
        yield (
            f"model.rotary_local_base={show(base)} needs model.window_size and "
            "model.position_embedding_type=rope, without model.multi_latent_attention"
        )
    yield from _activation_problems(model)
    if model.num_moe_experts is not None:
        yield from experts_problems(model, config.parallel.expert_tensor_parallel_size or 1)
        if Claim.ROUTER not in claimed:
            yield from router_problems(model)
        yield from _sparsemixer_problems(model, claimed)
        return
    for name in ("add_router_bias", "add_expert_bias", "moe_sparsemixer_eps"):
        if model[name]:
            yield (
                f"model.{name}={show(model[name])} needs experts; set model.num_moe_experts, or "
                "leave it out"
            )


def _activation_problems(model: FieldSection) -> Iterator[str]:
    for name in ("activation_func_clamp_value", "glu_linear_offset"):
        shown = f"model.{name}={show(model[name])}"
        if model[name] and not model.gated_linear_unit:
            yield f"{shown} needs model.gated_linear_unit=true"
        if model[name] and model.moe_shared_expert_overlap:
            yield f"{shown} is ignored with model.moe_shared_expert_overlap=true; leave one out"
    alpha = model.quick_gelu_alpha
    if alpha != QUICK_GELU_ALPHA and model.activation != "quick_gelu":
        yield f"model.quick_gelu_alpha={show(alpha)} needs model.activation=quick_gelu"


def _sparsemixer_problems(model: FieldSection, claimed: Collection[Claim]) -> Iterator[str]:
    shown = f"model.moe_sparsemixer_eps={show(model.moe_sparsemixer_eps)}"
    if model.moe_sparsemixer_eps is None:
        if model.moe_sparsemixer_sampling:
            yield "model.moe_sparsemixer_sampling=true needs model.moe_sparsemixer_eps"
        return
    if Claim.ROUTER in claimed:
        yield f"{shown} is of the built-in router; leave it out, or the plugin that replaces that"
    if model.moe_router_score_function != "softmax" or model.moe_router_num_groups:
        yield (
            f"{shown} needs model.moe_router_score_function=softmax, and no "
            "model.moe_router_num_groups"
        )
    if model.moe_router_force_load_balancing or model.moe_router_load_balancing_type == "sinkhorn":
        yield (
            f"{shown} selects experts itself; leave out model.moe_router_force_load_balancing and "
            "the balancing sinkhorn, or this"
        )


def experts_problems(model: FieldSection, expert_tp: int) -> Iterator[str]:
    """Yield problems of the experts' parameters, which are built-in for every experts kernel.

    Args:
        expert_tp: Expert tensor-parallel size.
    """
    biases = linear_biases(model)
    if model.moe_shared_expert_intermediate_size and (biases.mlp or model.add_bias_linear):
        yield (
            "model.add_bias_linear=true or model.add_mlp_bias=true: shared experts have no biases; "
            "set both to false, and name the other linears' biases one by one"
        )
    elif model.add_mlp_bias and model.moe_layer_freq == 1:
        yield (
            "model.add_mlp_bias=true is of dense layers, and every layer has experts; set "
            "model.add_expert_bias, or leave it out"
        )
    if expert_tp > 1 and (biases.experts or model.add_bias_linear):
        # A rank's output is a partial sum, to which a replicated bias would be added several times.
        yield (
            f"biases of experts with parallel.expert_tensor_parallel_size={expert_tp} are not "
            "supported; use 1, and parallel.expert_model_parallel_size to shard the experts"
        )


def router_problems(model: FieldSection | TransformerConfig) -> Iterator[str]:
    """Yield problems of the built-in router."""
    way_out = f"leave it out, or add a plugin that claims '{Claim.ROUTER}'"
    for name, why in _ROUTER_NOT_DONE.items():
        if value := getattr(model, name):
            shown = f"model.{name}={show(value)}"
            yield f"{shown} is not served by the built-in router: {why}; {way_out}"
    yield from _capacity_problems(model)
    balancing = model.moe_router_load_balancing_type
    if balancing not in _BALANCING:
        yield (
            f"model.moe_router_load_balancing_type={show(balancing)} is not served by the built-in "
            "router, whose loss is of one kind and does not depend on other micro-batches; use "
            f"{', '.join(_BALANCING)}, or add a plugin that claims '{Claim.ROUTER}'"
        )
    elif balancing == "sinkhorn":
        yield from _sinkhorn_problems(model)


def _capacity_problems(model: FieldSection | TransformerConfig) -> Iterator[str]:
    factor, pads = model.moe_expert_capacity_factor, model.moe_pad_expert_input_to_capacity
    most = (model.num_moe_experts or 0) / model.moe_router_topk
    shown = f"model.moe_expert_capacity_factor={show(factor)}"
    if factor is None:
        if pads or model.moe_token_drop_policy != "probs":
            yield (
                "model.moe_pad_expert_input_to_capacity and model.moe_token_drop_policy need "
                "model.moe_expert_capacity_factor"
            )
    elif factor <= 0:
        yield f"{shown} drops every token; use a positive number, or leave it out to drop none"
    elif pads and factor >= most:
        yield (
            f"{shown} pads every expert to all tokens; use less than {most:g}, the number of "
            "experts by model.moe_router_topk, or model.moe_pad_expert_input_to_capacity=false"
        )


def _sinkhorn_problems(model: FieldSection | TransformerConfig) -> Iterator[str]:
    shown = "model.moe_router_load_balancing_type='sinkhorn'"
    names = ("aux_loss_coeff", "router_num_groups", "router_enable_expert_bias")
    for name in (f"moe_{name}" for name in (*names, "expert_capacity_factor")):
        if value := getattr(model, name):
            yield f"{shown} does not go with model.{name}={show(value)}; leave one of them out"
    # Megatron's weights with Sinkhorn, whatever these two options are.
    by_sigmoid = model.moe_router_topk == 1
    if (model.moe_router_score_function == "sigmoid") != by_sigmoid or not (
        by_sigmoid or model.moe_router_pre_softmax
    ):
        yield (
            f"{shown} weighs a single expert by a sigmoid, and several by a softmax over all; with "
            f"model.moe_router_topk={model.moe_router_topk} set "
            + (
                "model.moe_router_score_function=sigmoid"
                if by_sigmoid
                else "model.moe_router_score_function=softmax and model.moe_router_pre_softmax=true"
            )
        )
