"""Select the MoE layers (``moe_layer_freq``): a pure function of the config, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ascend_run.types.config import FieldSection

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def moe_layers(model: FieldSection | TransformerConfig) -> frozenset[int]:
    """Return the layer slots that have experts.

    Args:
        model: ``config.model``, or Megatron's config after every plugin's ``ascend_configure``.
    """
    if not getattr(model, "num_moe_experts", None):
        return frozenset()
    frequency: int | Sequence[int] = getattr(model, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return frozenset(range(0, model.num_layers, frequency))
    return frozenset(place for place, flag in enumerate(frequency) if flag)
