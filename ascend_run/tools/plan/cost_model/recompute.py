"""Megatron's own recomputation (``recompute_granularity``), in the ledger's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ascend_run.plugin_api.contracts import Storage
from ascend_run.types.config import RunConfig

from .ledger import Ledger

_EVERYTHING: Final = ("*",)
_MODULES: Final = {
    "mlp": ("mlp",),
    "moe": ("router", "dispatcher", "experts", "shared_experts"),
    "shared_experts": ("shared_experts",),
}
"""Name in ``recompute_modules`` -> parts that are recomputed."""


def recompute_as_configured(
    config: RunConfig, ledger: Ledger, chunks: Sequence[Sequence[int]]
) -> None:
    """Apply the recomputation of ``[model]`` to the ledger, before any plugin's change."""
    model = config.model
    if model.recompute_granularity == "full":
        number = model.recompute_num_layers or 1
        depths = {layer for layers in chunks for layer in layers if layer >= model.num_layers}
        ledger.recompute(_EVERYTHING, [(layer,) for layer in sorted(depths)])
        for every in chunks:
            layers = [layer for layer in every if layer not in depths]
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
                ledger.recompute(parts, [(layer,) for layer in ledger.saved])


def _without_core_attention(ledger: Ledger) -> None:
    """Queries, keys and values are saved, and the attention kernel is recomputed."""
    for layer, saved in ledger.saved.items():
        for tensor in saved:
            if tensor.key in ("self_attention.out", "self_attention.lse"):
                tensor.storage, tensor.again = Storage.NONE, layer
