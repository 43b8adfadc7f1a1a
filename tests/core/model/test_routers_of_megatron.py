"""The built-in router against Megatron's own, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import MOE
from tests.support.small_runs import standing_model

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""Megatron computes scores in float32."""
SIGMOID = {"moe_router_score_function": "sigmoid"}
PLAIN = {"moe_aux_loss_coeff": 0.0}
NO_LOSS = {"moe_router_load_balancing_type": "none", **PLAIN}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the selected": NO_LOSS,
    "softmax of all, scaled": {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
        **NO_LOSS,
    },
    "groups and a bias": {
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,  # Megatron scores a group by its best topk / group_topk experts
        "moe_router_enable_expert_bias": True,
        **SIGMOID,
        **NO_LOSS,
    },
    "balancing loss": {"moe_aux_loss_coeff": 0.3},
    "balancing loss of each sequence": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        **SIGMOID,
    },
    "balancing loss beside a bias": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_router_enable_expert_bias": True,
        **SIGMOID,
    },
    "capacity": {"moe_expert_capacity_factor": 0.6, "moe_aux_loss_coeff": 0.3},
    "capacity that every expert fills": {
        "moe_expert_capacity_factor": 0.25,
        "moe_pad_expert_input_to_capacity": True,
        **NO_LOSS,
    },
    "z-loss": {"moe_z_loss_coeff": 0.1, **NO_LOSS},
    "sinkhorn": {
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_router_pre_softmax": True,
        **PLAIN,
    },
    "sinkhorn of one": {
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_router_topk": 1,
        "family": "qwen3_moe",  # the others' needs two experts a token
        **SIGMOID,
        **PLAIN,
    },
}


def outcome(router: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights, routing map and the gradients of the input and of the router's weight."""
    if router.expert_bias is not None:
        router.expert_bias.copy_(bias)
    x = x.clone().requires_grad_()
    weights, routing_map = router(x)
    factors = torch.linspace(0.5, 2.0, weights.numel()).view_as(weights)
    return weights, routing_map, *torch.autograd.grad((weights * factors).sum(), (x, router.weight))


@pytest.mark.parametrize("name", ROUTERS)
def test_weights_selection_and_gradients_are_those_of_megatron(name: str) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    values = {f"model.{key}": value for key, value in ROUTERS[name].items()}
    draw = torch.Generator().manual_seed(4)
    x, bias = torch.randn(16, 2, 32, generator=draw), torch.randn(8, generator=draw) / 10
    if "each sequence" in name or "bias" in name:
        # Megatron weighs the loss of each sequence by the tokens of one, whatever their number.
        x = x[:, :1]
    with standing_model({**MOE, "model.num_moe_experts": 8, **values}, torch.float32) as model:
        ours = model.decoder.layers[0].mlp.router
        groups: Any = SimpleNamespace(
            tp=ours.tp_group,
            cp=ours.cp_group,
            tp_cp=ours.tp_cp_group,
            tp_dp_cp=ours.tp_dp_cp_group,
        )
        theirs = TopKRouter(config=ours.config, pg_collection=groups)
        with torch.no_grad():
            ours.weight.mul_(10)
            theirs.weight.copy_(ours.weight)
        found, wanted = outcome(ours, x, bias), outcome(theirs, x, bias)
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found, wanted, **CLOSE)
