"""Transform micro-batches: trim padding, add document ends and prefix masks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch

from ascend_run.plugin_api import Batch, BatchField, RunConfig


def shorten(
    batches: Iterator[Batch], config: RunConfig, pad_to_multiple_of: int
) -> Iterator[Batch]:
    """Trim the padding that all rows of a micro-batch share.

    Bitwise neutral to the loss, since attention is causal. Lengths stay multiples of the number of
    shards of tensor and context parallelism.
    """
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    multiple = math.lcm(pad_to_multiple_of, shared * 2 if shared > 1 else 1)
    for batch in batches:
        counts = batch.tensors["loss_mask"].any(dim=0).nonzero()
        # Samples end with a trained token, so the last trained one ends the longest sample.
        needed = int(counts[-1]) + 1 if len(counts) else 1
        length = min(needed + -needed % multiple, batch.tensors["tokens"].shape[1])
        cut = {name: tensor[:, :length].contiguous() for name, tensor in batch.tensors.items()}
        yield attrs.evolve(batch, tensors=cut)


def show_prompts(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Let the tokens of a prompt attend to one another.

    A prompt is what precedes the first trained token of a conversation. Positions start at 0 in
    every conversation.
    """
    for batch in batches:
        positions_BS, loss_mask_BS = (batch.tensors[n] for n in ("position_ids", "loss_mask"))
        conversations_BS = (positions_BS == 0).cumsum(1)
        # The loss at a position is that of the next token.
        counted_BS = (loss_mask_BS > 0).cumsum(1).roll(1, 1)
        counted_BS[:, 0] = 0
        places_S = torch.arange(positions_BS.shape[1])
        begin_BS = places_S - positions_BS
        prompt_BS = counted_BS == counted_BS.gather(1, begin_BS)
        allowed_BSS = prompt_BS[:, :, None] & prompt_BS[:, None]
        allowed_BSS |= places_S[:, None] >= places_S
        allowed_BSS &= conversations_BS[:, :, None] == conversations_BS[:, None]
        yield attrs.evolve(
            batch,
            tensors={**batch.tensors, "attention_mask": allowed_BSS},
            fields={**batch.fields, "attention_mask": BatchField(axes=("batch", "query", "key"))},
        )


def add_document_ends(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Add the conversation ends of each sample to the batch.

    Each conversation starts at position 0. Padding belongs to the last one, which does not attend
    to it.
    """
    for batch in batches:
        begins_BS = batch.tensors["position_ids"] == 0
        starts = [row.nonzero().flatten().tolist() for row in begins_BS]
        ends = tuple((*of_row[1:], begins_BS.shape[1]) for of_row in starts)
        yield attrs.evolve(batch, row_ends=ends)
