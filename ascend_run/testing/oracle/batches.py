"""Micro-batches: rows of samples, the documents in them, and what a prompt shows.

Sources: documents, arXiv:2107.02027; packed conversations and prefix prompts, arXiv:1910.10683.
"""

# shapes: see the package

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor

from ascend_run.types.config import RunConfig

Samples = Mapping[str, Tensor]
"""``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each [samples, S]."""


@attrs.frozen(kw_only=True)
class MicroBatch:
    """Rows that one forward computes."""

    tokens_BS: Tensor
    labels_BS: Tensor
    loss_mask_BS: Tensor
    positions_BS: Tensor
    """Of each token in its document; read by learned positions and log-n scaling."""
    document_BS: Tensor
    """Number of each token's document in its row. Tokens attend to their own document."""
    prompt_BS: Tensor | None = None
    """Number of the prompt that a token belongs to, or -1. Tokens of a prompt attend to all of
    it."""


def micro_batches(config: RunConfig, samples: Samples) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a global batch: consecutive samples, on one rank."""
    rows = config.train.micro_batch_size
    for first in range(0, len(samples["tokens"]), rows):
        tokens_BS, labels_BS, mask_BS, positions_BS = (
            samples[name][first : first + rows]
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        )
        batch = MicroBatch(
            tokens_BS=tokens_BS,
            labels_BS=labels_BS,
            loss_mask_BS=mask_BS,
            positions_BS=positions_BS,
            document_BS=torch.zeros_like(tokens_BS),
        )
        if config.task == "sft":
            batch = _of_conversations(batch, config)
        elif "eod-reset" in config.enable:
            batch = _of_documents(batch, config)
        yield batch


def _of_documents(batch: MicroBatch, config: RunConfig) -> MicroBatch:
    """Start a document after each end-of-document token, or after a fixed number of tokens."""
    options = config.plugins["eod-reset"]
    place_S = torch.arange(batch.tokens_BS.shape[1])
    if options.document_length is not None:
        document_BS = (place_S // options.document_length).expand_as(batch.tokens_BS)
    else:
        ends_BS = batch.tokens_BS == options.eod_token_id
        document_BS = ends_BS.cumsum(dim=1) - ends_BS.long()
    if options.reset_position_ids:
        # The position in a row, minus that of the document's first token.
        is_first_BS = document_BS.diff(dim=1, prepend=document_BS[:, :1] - 1) > 0
        begin_BS = (place_S * is_first_BS).cummax(dim=1).values
        batch = attrs.evolve(batch, positions_BS=place_S - begin_BS)
    if options.reset_attention_mask:
        batch = attrs.evolve(batch, document_BS=document_BS)
    return batch


def _of_conversations(batch: MicroBatch, config: RunConfig) -> MicroBatch:
    """Separate packed conversations, each of which starts at position 0; show prompts."""
    options = config.plugins["sft"]
    if _trims_padding(config):
        batch = _trimmed(batch, options.pad_to_multiple_of)
    conversation_BS = (batch.positions_BS == 0).cumsum(dim=1)
    if options.packing:
        batch = attrs.evolve(batch, document_BS=conversation_BS)
    if options.bidirectional_prompt:
        # A token is of the prompt if no trained token of its conversation comes before it. The
        # loss at a position is that of the next token.
        trained_BS = (batch.loss_mask_BS > 0).cumsum(dim=1) - (batch.loss_mask_BS > 0).long()
        begin_BS = torch.arange(conversation_BS.shape[1]) - batch.positions_BS
        is_prompt_BS = trained_BS == trained_BS.gather(1, begin_BS)
        prompt_BS = torch.where(is_prompt_BS, conversation_BS, -1)
        batch = attrs.evolve(batch, document_BS=conversation_BS, prompt_BS=prompt_BS)
    return batch


def _trims_padding(config: RunConfig) -> bool:
    """Return whether micro-batches may be shorter than the samples. What they compute of trained
    tokens is equal; balancing losses and some scalings of positions read the padding too."""
    padding, model = config.plugins["sft"].padding, config.model
    reads_padding = model.num_moe_experts or model.rope_scaling_type in ("dynamic", "longrope")
    return bool(padding == "longest" or (padding == "auto" and not reads_padding))


def _trimmed(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Drop the columns after the last trained token, down to a multiple."""
    trained = batch.loss_mask_BS.any(dim=0).nonzero()
    needed = int(trained[-1]) + 1 if len(trained) else 1
    length = min(multiple * math.ceil(needed / multiple), batch.tokens_BS.shape[1])
    cut: dict[str, Tensor] = {
        name: x_BS[:, :length] for name, x_BS in attrs.asdict(batch).items() if x_BS is not None
    }
    return attrs.evolve(batch, **cut)


def later(x_BS: Tensor, depth: int, batch: MicroBatch) -> Tensor:
    """Return what stands ``depth`` tokens later in the same document; 0 where it has ended."""
    later_BS = torch.zeros_like(x_BS)
    same_BS = batch.document_BS[:, depth:] == batch.document_BS[:, :-depth]
    later_BS[:, :-depth] = torch.where(same_BS, x_BS[:, depth:], 0)
    return later_BS
