"""Cost of attention on the CPU beyond that of a fused kernel. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ascend_run.ops.attention.score_blocks import block_cost, needs_blocks
from ascend_run.ops.attention.visibility import HALVED_FROM
from ascend_run.ops.linear.matmul_blocks import block_bytes
from ascend_run.ops.linear.wide_factors import wide_factors
from ascend_run.plugin_api import (
    CostChange,
    Layout,
    Phase,
    PipelineStage,
    RunConfig,
    SavedChange,
    SavedTensor,
    Storage,
    WorkingMemory,
)

from .options import CpuOptions

_WIDE = 4
_CHUNK_BYTES = 64 * 2**20
"""Of logits that the loss holds at a time, by default."""
_SQUARES = 1.5


def platform_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: CpuOptions
) -> CostChange:
    """Return the cost of attention and of matmuls on the CPU.

    Device memory is host memory. The fused kernel does not support dropout, softcap and biases in
    backward: then scores are materialized, one block at a time. Work in float32 holds temporary
    wide copies of its operands, and oneDNN a block of the logits beside them; what is selected by
    timing is not known here.
    """
    cost = _attention_cost(config, layout, rank)
    if config.train.precision == "fp32" and options.fp32_matmul_library == "onednn":
        return attrs.evolve(cost, working=(*cost.working, *_block_of_logits(config, rank)))
    if config.train.precision != "bf16":
        return cost
    copies: list[WorkingMemory] = []
    if options.bf16_matmul_dtype == "fp32":
        copies += wide_factors(rank, config.model.hidden_size)
    if options.bf16_attention_dtype == "fp32" and not needs_blocks(rank.attention_needs):
        copies.append(_wide_attention(rank))
    return attrs.evolve(cost, working=(*cost.working, *copies))


def _block_of_logits(config: RunConfig, rank: PipelineStage) -> Iterator[WorkingMemory]:
    """Yield what ``ops.linear.onednn_matmul`` holds beside a chunk of logits, as far as it is more
    than the gradients that are computed after it."""
    hidden, table = config.model.hidden_size, _vocabulary(rank)
    if not (rank.is_last and table):
        return
    rows = table // hidden
    chunk = max(1, (config.train.loss_chunk_bytes or _CHUNK_BYTES) // (_WIDE * rows))
    later = min(chunk, rank.tokens) * hidden + (table if chunk >= rank.tokens else 0)
    more = block_bytes(min(chunk, rank.tokens), rows) - _WIDE * later
    if more > 0:
        yield WorkingMemory(part="loss", name="block of logits", nbytes=more, phase=Phase.LOSS)


def _vocabulary(rank: PipelineStage) -> int:
    """Return the elements of the weight that hidden states are projected to logits with."""
    weights = {parameter.key: parameter.numel for parameter in rank.parameters}
    return weights.get("output_layer.weight", weights.get("embedding.word_embeddings", 0))


def _wide_attention(rank: PipelineStage) -> WorkingMemory:
    """Return the float32 copies of all that the backward reads, and its float32 gradients."""
    sizes = {tensor.name: tensor.nbytes for tensor in next(iter(rank.saved.values()), ())}
    query, key = (sizes.get(name, 0.0) for name in ("q", "k"))
    output, value = (size * rank.value_width / rank.head_width for size in (query, key))
    widened = 2 * (query + key + value) + 2 * output
    return WorkingMemory(
        part="self_attention.core",
        name="wide operands",
        nbytes=widened * _WIDE / rank.item_bytes,
        phase=Phase.BACKWARD,
    )


def _attention_cost(config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
    part = "self_attention"
    uncopied = SavedChange(tensors=(f"{part}.attended",), storage=Storage.NONE)
    if not needs_blocks(rank.attention_needs):
        halved = _by_halves(config, layout, rank)
        is_read_as_written = halved and rank.head_width == rank.value_width
        return CostChange(
            host_is_device=True,
            working=(_gradients_of_squares(rank),) if halved else (),
            saved=(uncopied,) if is_read_as_written else (),
        )
    cost = block_cost(config, layout.cp, rank)
    return CostChange(
        host_is_device=True,
        working=(
            WorkingMemory(
                part=f"{part}.core",
                name="scores",
                nbytes=cost.scores_bytes,
                phase=Phase.BACKWARD,
            ),
        ),
        saved=(uncopied,),
        saved_added=(SavedTensor(part=part, name="copied", nbytes=cost.output_bytes),),
        flops=cost.flops,
    )


def _by_halves(config: RunConfig, layout: Layout, rank: PipelineStage) -> bool:
    """Return whether ``ops.attention.halved_attention`` runs.

    It writes the output in the layout that the projection reads, unless values are narrower than
    keys.
    """
    other = {"window", "documents"} & rank.attention_needs
    is_long = config.data.seq_length >= HALVED_FROM and layout.cp == 1
    return is_long and not other and rank.item_bytes == _WIDE


def _gradients_of_squares(rank: PipelineStage) -> WorkingMemory:
    """Return the gradients of squares of one size, and half as much for the next size.

    If values are narrower than keys, this adds the tensors that are padded for the kernel.
    """
    sizes = {tensor.name: tensor.nbytes for tensor in next(iter(rank.saved.values()), ())}
    query, key = (sizes.get(name, 0.0) for name in ("q", "k"))
    nbytes = _SQUARES * (query + 2 * key)
    if rank.head_width != rank.value_width:
        nbytes += 2 * query + key  # the output, its gradient, and the values
    return WorkingMemory(
        part="self_attention.core", name="squares", nbytes=nbytes, phase=Phase.BACKWARD
    )
