"""What attention holds on the CPU beside what a fused kernel does. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import Layout, Moment, RankKind, RunConfig, WorkingMemory

_QUERY_BLOCK: Final = 256
_BLOCKS: Final = 8
"""Of scores, and what follows from them, in the backward of ``ops.blockwise_attention``."""
_WIDE: Final = 4


def blocks_of_scores(
    config: RunConfig, layout: Layout, rank: RankKind
) -> tuple[WorkingMemory, ...]:
    """Dropout and a soft cap change what no fused kernel here follows in backward."""
    model = config.model
    if not model.attention_dropout and not model.get("attn_logit_softcapping"):
        return ()
    length = config.data.seq_length // layout.cp
    pairs = config.train.micro_batch_size * rank.heads * min(_QUERY_BLOCK, length) * length
    return (
        WorkingMemory(
            part="self_attention",
            name="scores",
            nbytes=_BLOCKS * pairs * _WIDE,
            moment=Moment.BACKWARD,
        ),
    )
