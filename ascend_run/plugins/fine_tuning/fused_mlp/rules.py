"""Conflicts of a fused MLP with the rest of a run. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ascend_run.plugin_api import RunConfig
from ascend_run.plugin_api.expert_layers import moe_layers

LINEARS: Final = ("linear_fc1", "linear_fc2")
"""Both linears of an MLP, each of which needs an adapter."""
_ALL: Final = "all-linear"


def problems(config: RunConfig, adapters: Any) -> Sequence[str]:
    """Return one sentence for each conflict.

    Args:
        adapters: The options of ``lora``.
    """
    return [f"fused-mlp: {problem}" for problem in _problems(config, adapters)]


def _problems(config: RunConfig, adapters: Any) -> Iterator[str]:
    targets = adapters.target_modules
    missing = [name for name in LINEARS if not _adapts(name, targets)]
    if missing:
        yield (
            f"plugins.lora.target_modules={','.join(targets)} leaves {' and '.join(missing)} "
            f"without an adapter; expected {' and '.join(LINEARS)}, or {_ALL}, among them"
        )
    if adapters.dora:
        yield (
            "plugins.lora.dora=true scales the sum of a linear and its adapter, which are one "
            "function here; set it to false, or leave fused-mlp out"
        )
    model = config.model
    if len(moe_layers(model)) == model.num_layers:
        yield (
            f"every layer has experts (model.num_moe_experts={model.num_moe_experts}), which it "
            "does not compute; leave fused-mlp out"
        )


def _adapts(linear: str, targets: Sequence[str]) -> bool:
    """Return whether a linear, or a part of it, has an adapter."""
    return any(one in (_ALL, linear) or one.startswith(f"{linear}_") for one in targets)
