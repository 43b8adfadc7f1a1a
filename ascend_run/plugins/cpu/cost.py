"""What attention costs on the CPU beside what a fused kernel does. No torch."""

from __future__ import annotations

from ascend_run.ops.attention.score_blocks import block_cost, needs_blocks
from ascend_run.ops.attention.visibility import HALVED_FROM
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
_SQUARES = 1.5


def platform_cost(config: RunConfig, layout: Layout, rank: RankKind) -> CostChange:
    """Host and device are one memory. Dropout, a soft cap and biases change what no fused kernel
    here follows in backward: then the scores are there, a block at a time."""
    part = "self_attention"
    uncopied = KeptChange(tensors=(f"{part}.attended",), place=Place.NOWHERE)
    if not needs_blocks(rank.attention_needs):
        halved = _by_halves(config, layout, rank)
        is_read_as_written = halved and rank.head_width == rank.value_width
        return CostChange(
            host_is_device=True,
            working=(_gradients_of_squares(rank),) if halved else (),
            kept=(uncopied,) if is_read_as_written else (),
        )
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
    """Whether ``ops.attention.halved_attention`` computes, which writes the output as the
    projection reads it, but for values narrower than keys."""
    other = {"window", "documents"} & rank.attention_needs
    is_long = config.data.seq_length >= HALVED_FROM and layout.cp == 1
    return is_long and not other and rank.item_bytes == _WIDE


def _gradients_of_squares(rank: RankKind) -> WorkingMemory:
    """Those of the squares of one size, and of half of them, those of the next; where values are
    narrower than keys, what is made as wide for the kernel."""
    sizes = {tensor.name: tensor.nbytes for tensor in next(iter(rank.kept.values()), ())}
    query, key = (sizes.get(name, 0.0) for name in ("q", "k"))
    nbytes = _SQUARES * (query + 2 * key)
    if rank.head_width != rank.value_width:
        nbytes += 2 * query + key  # the output, its gradient, and the values
    return WorkingMemory(
        part="self_attention.core", name="squares", nbytes=nbytes, moment=Moment.BACKWARD
    )
