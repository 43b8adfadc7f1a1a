"""Working memory of a layer's forward, if it can be the peak."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.plugin_api.contracts import Phase, WorkingMemory
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .sizes import Sizes

_WIDE = 4


def forward_working(config: RunConfig, layout: Layout, sizes: Sizes) -> Iterator[WorkingMemory]:
    """Yield the memory for reducing the outputs of experts that are sharded over several ranks.

    Megatron's all-to-all dispatcher holds the tokens that it sent and received and the experts'
    outputs before and after sorting, and sums them in float32. With expert parallelism in addition,
    the number of tokens differs between ranks, and gloo sends buffers that are padded to one
    length.
    """
    if layout.expt_tp == 1 or config.model.moe_token_dispatcher_type == "allgather":
        return
    one = sizes.hidden * sizes.item_bytes
    sent = sizes.expert_tokens * one * (2 if layout.ep > 1 else 1)
    summed = sizes.expert_rows * sizes.hidden * _WIDE * (1 + 1 / layout.expt_tp)
    padded = summed if layout.ep > 1 else 0.0
    nbytes = sent + 2 * sizes.expert_rows * one + summed + padded
    yield WorkingMemory(part="dispatcher", name="sums", nbytes=nbytes, phase=Phase.FORWARD)
