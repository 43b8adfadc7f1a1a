"""What the grouped products keep and hold. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import CostChange, KeptChange, Moment, Place, RankKind, WorkingMemory

_NOT_KEPT: Final = ("experts.product", "experts.weighted")
_BY_AUTOGRAD: Final = ("experts.activation", "experts.weights")


def grouped_cost(rank: RankKind, *, gated: bool, is_silu: bool) -> CostChange:
    """The tokens, the first product and, for SwiGLU, the non-linearity of the gate are kept; in
    backward all experts' intermediates are there at once.

    Args:
        gated: Whether the first product has a gate.
        is_silu: Whether the non-linearity is SiLU, whose backward is by hand.
    """
    layer = min(rank.moe_layers)
    sizes = {tensor.key: tensor.nbytes for tensor in rank.kept[layer]}
    width, tokens = sizes["experts.product"], sizes["experts.input"]
    not_kept = _NOT_KEPT if gated and is_silu else (*_NOT_KEPT, "experts.activated")
    rows = 2 if gated else 1
    # Gradient in, that of the product, the product again, that of the first product.
    held = tokens + width * (2 + rows)
    return CostChange(
        kept=(KeptChange(tensors=not_kept, place=Place.NOWHERE),),
        working=(
            WorkingMemory(
                part="experts", name="intermediates", nbytes=held, moment=Moment.BACKWARD
            ),
        ),
        working_removed=_BY_AUTOGRAD,
    )
