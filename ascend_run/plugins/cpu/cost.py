"""What attention costs on the CPU beside what a fused kernel does. No torch."""

from __future__ import annotations

from ascend_run.ops.score_blocks import block_cost, needs_blocks
from ascend_run.ops.visibility import HALVED_FROM
from ascend_run.plugin_api import (
    CostChange,
    KeptChange,
    KeptTensor,
    Layout,
    Moment,
    Place,
    RankKind,
    RunConfig,
    WorkingMemory,
)

_WIDE = 4


def platform_cost(config: RunConfig, layout: Layout, rank: RankKind) -> CostChange:
    """Host and device are one memory. Dropout, a soft cap and biases change what no fused kernel
    here follows in backward: then the scores are there, a block at a time."""
    part = "self_attention"
    uncopied = KeptChange(tensors=(f"{part}.attended",), place=Place.NOWHERE)
    if not needs_blocks(rank.attention_needs):
        halved = _by_halves(config, layout, rank)
        return CostChange(host_is_device=True, kept=(uncopied,) if halved else ())
    cost = block_cost(config, layout.cp, rank)
    return CostChange(
        host_is_device=True,
        working=(
            WorkingMemory(
                part=f"{part}.core",
                name="scores",
                nbytes=cost.scores_bytes,
                moment=Moment.BACKWARD,
            ),
        ),
        kept=(uncopied,),
        kept_added=(KeptTensor(part=part, name="copied", nbytes=cost.output_bytes),),
        flops=cost.flops,
    )


def _by_halves(config: RunConfig, layout: Layout, rank: RankKind) -> bool:
    """Whether ``ops.halved_attention`` writes the output, as the projection reads it."""
    other = {"window", "documents"} & rank.attention_needs
    is_long = config.data.seq_length >= HALVED_FROM and layout.cp == 1
    one_width = rank.head_width == rank.value_width
    return is_long and one_width and not other and rank.item_bytes == _WIDE
