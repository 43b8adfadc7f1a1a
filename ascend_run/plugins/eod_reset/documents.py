"""Where the documents of a batch end, and their positions; imports torch."""

# B micro-batch, S whole sequence

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import BatchIterator

if TYPE_CHECKING:
    from . import EodResetConfig


def reset(batches: BatchIterator, eod: int, options: EodResetConfig) -> BatchIterator:
    """The same batches, with what the options ask."""
    for batch in batches:
        tokens = batch.tensors["tokens"]
        if options.reset_position_ids:
            tensors = {**batch.tensors, "position_ids": positions(tokens, eod)}
            batch = attrs.evolve(batch, tensors=tensors)
        if options.reset_attention_mask:
            (row,) = tokens
            batch = attrs.evolve(batch, document_ends=ends(row, eod))
        yield batch


def ends(tokens_S: Tensor, eod: int) -> tuple[int, ...]:
    """One past the last position of each document; the last is the length of the sequence."""
    found = ((tokens_S == eod).nonzero().flatten() + 1).tolist()
    length = len(tokens_S)
    return (*found, length) if not found or found[-1] != length else tuple(found)


def positions(tokens_BS: Tensor, eod: int) -> Tensor:
    """[B, S] int64: from 0 in every document."""
    whole = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    after = torch.zeros_like(tokens_BS)
    after[:, 1:] = torch.where(tokens_BS[:, :-1] == eod, whole[:, 1:], 0)
    return whole - after.cummax(dim=1).values
