"""Families with experts: what they share, beside the dense decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from ascend_run.plugin_api import Condition, ConfigKey, TensorMap

from .decoder import HF_LAYER, LAYER
from .forms import NEGATION

EXPERT_DEFAULTS: Final[Mapping[str, object]] = MappingProxyType(
    {
        "model.moe_router_score_function": "softmax",
        "model.moe_router_load_balancing_type": "aux_loss",
        "model.moe_aux_loss_coeff": 0.001,
        "model.moe_token_dispatcher_type": "alltoall",
    }
)
"""Router, auxiliary loss and token dispatcher of most families with experts."""
SPARSE: Final = Condition(
    "model.num_moe_experts",
    ">",
    1,
    why="this family is a mixture of experts",
    fix="set model.num_moe_experts, or choose a family without experts",
)
"""What a family with experts in every layer requires."""


def router_keys(count: str, *, experts: int, topk: int, also: str = "") -> tuple[ConfigKey, ...]:
    """Return the keys of the router, with their defaults.

    Args:
        count: Key of the number of experts.
        experts, topk: Number of experts, and of those that a token uses.
        also: Another name of ``count``.
    """
    return (
        ConfigKey(hf=count, field="model.num_moe_experts", default=experts, also=also),
        ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk", default=topk),
        ConfigKey(hf="router_aux_loss_coef", field="model.moe_aux_loss_coeff", default=0.001),
    )


def normalized_topk() -> tuple[ConfigKey, ...]:
    """Return the key that normalizes the weights of the selected experts to a sum of 1."""
    return (
        ConfigKey(
            hf="norm_topk_prob",
            field="model.moe_router_pre_softmax",
            default=False,
            form=NEGATION,
        ),
    )


def expert_tensors(
    block: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    layers: str = "all",
) -> Iterator[TensorMap]:
    """Yield the router's weight and those of the experts, stored one by one.

    Args:
        block: Name of the MoE block in a layer.
        parts: Names of an expert's gate, up and down projections.
        layers: As in TensorMap.
    """
    at, gate, up, down = f"{HF_LAYER}.{block}", *parts
    yield TensorMap(megatron=f"{LAYER}.mlp.router.weight", hf=(f"{at}.gate.weight",), layers=layers)
    for name, stored in (("fc1", (gate, up)), ("fc2", (down,))):
        yield TensorMap(
            megatron=f"{LAYER}.mlp.experts.{name}",
            hf=tuple(f"{at}.experts.{{expert}}.{part}.weight" for part in stored),
            form="stack_experts",
            layers=layers,
        )


def shared_expert_tensors() -> Iterator[TensorMap]:
    """Yield the tensors of one shared expert and of the gate on its output."""
    theirs, ours = f"{HF_LAYER}.mlp", f"{LAYER}.mlp.shared_experts"
    expert = f"{theirs}.shared_expert"
    yield TensorMap(
        megatron=f"{ours}.linear_fc1.weight",
        hf=(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"),
        form="concat",
    )
    yield TensorMap(megatron=f"{ours}.linear_fc2.weight", hf=(f"{expert}.down_proj.weight",))
    yield TensorMap(megatron=f"{ours}.gate_weight", hf=(f"{theirs}.shared_expert_gate.weight",))
