"""Megatron's own recomputation (``recompute_granularity``), in the ledger's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import Place

from .ledger import Ledger

_EVERYTHING: Final = ("*",)
_MODULES: Final = {
    "mlp": ("mlp",),
    "moe": ("router", "dispatcher", "experts", "shared_experts"),
    "shared_experts": ("shared_experts",),
}
"""Parts that each of ``recompute_modules`` runs again."""


def recompute_as_configured(
    config: RunConfig, ledger: Ledger, chunks: Sequence[Sequence[int]]
) -> None:
    """Change the ledger as ``[model]`` asks for, before any plugin does."""
    model = config.model
    if model.recompute_granularity == "full":
        number = model.recompute_num_layers or 1
        for layers in chunks:
            if model.recompute_method == "block":
                groups = [layers[i : i + 1] for i in range(min(number, len(layers)))]
            else:
                groups = [layers[i : i + number] for i in range(0, len(layers), number)]
            ledger.recompute(_EVERYTHING, groups)
    elif model.recompute_granularity == "selective":
        for module in model.recompute_modules or ("core_attn",):
            if module == "core_attn":
                _without_core_attention(ledger)
            else:
                parts = _MODULES.get(module, ())
                ledger.recompute(parts, [(layer,) for layer in ledger.kept])


def _without_core_attention(ledger: Ledger) -> None:
    """Queries, keys and values stay, and the attention is computed again."""
    for layer, kept in ledger.kept.items():
        for tensor in kept:
            if tensor.key in ("self_attention.out", "self_attention.lse"):
                tensor.place, tensor.again = Place.NOWHERE, layer
