"""Cost of DoRA's magnitudes and of the norms of rows. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api import Communication, ParameterCost, SavedTensor

if TYPE_CHECKING:
    from ascend_run.plugin_api import PipelineStage

_NORM_BYTES: Final = 4
"""Of a row's sum of squares, which is summed over the ranks of a row-parallel linear."""


@attrs.frozen(kw_only=True)
class AdaptedLinear:
    """A linear on one rank, and the adapters of its parts."""

    weight: ParameterCost
    columns: int  #: Its inputs.
    is_split: bool  #: Whether its inputs are sharded over tensor-parallel ranks.
    ranks: Sequence[int]  #: Rank of each part's adapter.
    part_rows: Sequence[int]  #: Rows of each part's B.

    @property
    def rows(self) -> int:
        return int(self.weight.numel // self.columns)

    @property
    def magnitudes(self) -> ParameterCost:
        return ParameterCost(
            part=self.weight.part,
            name=f"{self.weight.name}.lora_magnitude",
            numel=sum(self.part_rows),
            is_matrix=False,
            layer=self.weight.layer,
            sees_own_tokens=self.is_split,
        )

    @property
    def flops(self) -> float:
        """Of the norms in one forward: ``W A^T``, ``A A^T`` and its product with B, and B in
        Megatron's order of rows."""
        width = sum(self.ranks)
        parts = sum(n * rank for n, rank in zip(self.part_rows, self.ranks, strict=True))
        norms = self.rows * self.columns + width * self.columns + self.rows * width
        return 2.0 * width * (norms + parts)


def unscaled(rank: PipelineStage, linears: Sequence[AdaptedLinear], scattered: int) -> SavedTensor:
    """Return the outputs of a layer's adapted linears before they are scaled.

    Args:
        scattered: Number of ranks over which the tokens of a row-parallel output are scattered.
    """
    tokens = sum(
        one.rows / (scattered if one.is_split else 1)
        for one in linears
        if one.weight.layer == rank.layers[0]
    )
    nbytes = tokens * rank.tokens * rank.item_bytes
    return SavedTensor(part="self_attention", name="unscaled", nbytes=nbytes)


def norm_messages(
    rank: PipelineStage, linears: Sequence[AdaptedLinear], tp: int
) -> Iterator[Communication]:
    """Yield the sums of squares of row-parallel linears, of each forward."""
    for one in linears:
        if tp > 1 and one.is_split:
            yield Communication(
                operation="all_reduce",
                group="tp",
                calls=rank.num_microbatches,
                sent_bytes=rank.num_microbatches * one.rows * _NORM_BYTES,
                why=f"{one.weight.part}, forward: norms of rows",
            )
