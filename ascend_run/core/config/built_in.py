"""What the kernel's own modules do not do, where no plugin stands in for them: one truth.

Planning asks it of the config; the modules, of what they are built with, which a plugin's
``ascend_configure`` may have changed since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from ascend_run.plugin_api.manifest import Claim

from .value_types import show

_ROUTER_NOT_DONE: Final = (
    "moe_enable_routing_replay",
    "moe_expert_capacity_factor",
    "moe_input_jitter_eps",
    "moe_router_enable_expert_bias",
    "moe_router_force_load_balancing",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_topk_limited_devices",
)
"""Megatron's options that its own router serves and this one does not."""
_BALANCING: Final = ("aux_loss", "none")


def built_in_problems(model: Any, claimed: Collection[Claim]) -> Iterator[str]:
    """A sentence for each option that our own modules would ignore.

    Args:
        model: The section ``[model]``, or Megatron's TransformerConfig.
        claimed: Seams that plugins own, whose modules answer for themselves.
    """
    if _value(model, "num_moe_experts") is not None:
        yield from experts_problems(model)
        if Claim.ROUTER not in claimed:
            yield from router_problems(model)


def experts_problems(model: Any) -> Iterator[str]:
    """Of the experts' parameters, which are the kernel's own whoever computes with them."""
    if _value(model, "add_bias_linear"):
        yield "model.add_bias_linear=true: experts have no biases; set it to false"


def router_problems(model: Any) -> Iterator[str]:
    """Of the built-in router."""
    way_out = f"leave it out, or add a plugin that claims '{Claim.ROUTER}'"
    for name in _ROUTER_NOT_DONE:
        if value := _value(model, name):
            yield f"model.{name}={show(value)} is not served by the built-in router; {way_out}"
    balancing = _value(model, "moe_router_load_balancing_type")
    if balancing not in _BALANCING:
        yield (
            f"model.moe_router_load_balancing_type={show(balancing)} is not served by the built-in "
            f"router; use {' or '.join(_BALANCING)}, or add a plugin that claims '{Claim.ROUTER}'"
        )


def _value(model: Any, name: str) -> Any:
    return model.get(name) if isinstance(model, Mapping) else getattr(model, name)
