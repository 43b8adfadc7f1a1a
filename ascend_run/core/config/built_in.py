"""Options that the built-in modules do not support.

Planning checks the config; the modules check what they are built with, since a plugin's
``ascend_configure`` may have changed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.manifest import Claim

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ascend_run.types.config import FieldSection

_ROUTER_NOT_DONE: Final = (
    "moe_enable_routing_replay",
    "moe_expert_capacity_factor",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_router_topk_limited_devices",
)
"""Options that Megatron's router supports and the built-in one does not."""
_BALANCING: Final = ("aux_loss", "none")


def built_in_problems(
    model: FieldSection | TransformerConfig, claimed: Collection[Claim]
) -> Iterator[str]:
    """Yield a message for each option that the built-in modules would ignore.

    Args:
        model: The ``[model]`` section, or Megatron's TransformerConfig.
        claimed: Seams owned by plugins, whose modules check their own options.
    """
    ours = ("rotary_local_base", "position_embedding_type")  # not in Megatron's config
    base, kind = (getattr(model, name, None) for name in ours)
    if base and (not model.window_size or kind != "rope" or model.multi_latent_attention):
        yield (
            f"model.rotary_local_base={show(base)} needs model.window_size and "
            "model.position_embedding_type=rope, without model.multi_latent_attention"
        )
    if model.num_moe_experts is not None:
        yield from experts_problems(model)
        if Claim.ROUTER not in claimed:
            yield from router_problems(model)


def experts_problems(model: FieldSection | TransformerConfig) -> Iterator[str]:
    """Yield problems of the experts' parameters, which are built-in for every experts kernel."""
    for name in ("add_bias_linear", "add_mlp_bias"):
        if getattr(model, name, None):  # Megatron's config has the first only
            yield f"model.{name}=true: experts have no biases; set it to false"


def router_problems(model: FieldSection | TransformerConfig) -> Iterator[str]:
    """Yield problems of the built-in router."""
    way_out = f"leave it out, or add a plugin that claims '{Claim.ROUTER}'"
    for name in _ROUTER_NOT_DONE:
        if value := getattr(model, name):
            yield f"model.{name}={show(value)} is not served by the built-in router; {way_out}"
    balancing = model.moe_router_load_balancing_type
    if balancing not in _BALANCING:
        yield (
            f"model.moe_router_load_balancing_type={show(balancing)} is not served by the built-in "
            f"router; use {' or '.join(_BALANCING)}, or add a plugin that claims '{Claim.ROUTER}'"
        )
