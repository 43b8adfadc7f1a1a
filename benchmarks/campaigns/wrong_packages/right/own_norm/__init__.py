"""RMSNorm with a backward of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.plugin_api import (
    Condition,
    Manifest,
    Maturity,
    Numerics,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn


class OwnNorm:
    """Compute RMSNorm with one autograd function. Numerics: another order of sums."""

    manifest = Manifest(
        name="own-norm",
        summary="compute RMSNorm with one autograd function",
        requires=(
            Condition(
                "model.normalization",
                "==",
                "RMSNorm",
                why="it computes no other norm",
                fix="set model.normalization=RMSNorm",
            ),
        ),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL},
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        requires_api=">=0,<1",
    )

    @hookimpl
    def ascend_norm(self) -> type[nn.Module]:
        from .norm import OwnRootMeanSquareNorm

        return OwnRootMeanSquareNorm
