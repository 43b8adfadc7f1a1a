"""Which layers have experts (``moe_layer_freq``): a pure function of the config, without torch."""

from __future__ import annotations

from ascend_run.plugin_api.config import RunConfig


def moe_layers(config: RunConfig) -> frozenset[int]:
    """Places of the whole model whose layers have experts."""
    model = config.model
    if not model.get("num_moe_experts"):
        return frozenset()
    frequency = model.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return frozenset(range(0, model.num_layers, frequency))
    return frozenset(place for place, flag in enumerate(frequency) if flag)
