"""Document ends and positions of a batch; imports torch."""

# B micro-batch, S full sequence

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import BatchIterator

if TYPE_CHECKING:
    from . import EodResetConfig


@attrs.frozen
class Borders:
    """Document ends and positions of a micro-batch, computed from its tokens [B, S].

    ``ends`` returns the field of a ``Batch`` that holds the document ends.
    """

    ends: Callable[[Tensor], dict[str, Any]]
    positions: Callable[[Tensor], Tensor]


def after_token(eod: int) -> Borders:
    """End a document after each ``eod`` token; the ends differ from row to row."""
    return Borders(
        lambda tokens: {"row_ends": tuple(ends(row, eod) for row in tokens)},
        lambda tokens: positions(tokens, eod),
    )


def every(length: int) -> Borders:
    """End a document after every ``length`` positions, in all rows alike. Unit: tokens."""

    def fixed_ends(tokens_BS: Tensor) -> dict[str, object]:
        whole = tokens_BS.shape[1]
        return {"document_ends": (*range(length, whole, length), whole)}

    def fixed_positions(tokens_BS: Tensor) -> Tensor:
        return (torch.arange(tokens_BS.shape[1]) % length).expand_as(tokens_BS)

    return Borders(fixed_ends, fixed_positions)


def reset(batches: BatchIterator, borders: Borders, options: EodResetConfig) -> BatchIterator:
    """Yield the batches with document ends and positions reset as the options request."""
    for batch in batches:
        tokens = batch.tensors["tokens"]
        if options.reset_position_ids:
            tensors = {**batch.tensors, "position_ids": borders.positions(tokens)}
            batch = attrs.evolve(batch, tensors=tensors)
        if options.reset_attention_mask:
            batch = attrs.evolve(batch, **borders.ends(tokens))
        yield batch


def ends(tokens_S: Tensor, eod: int) -> tuple[int, ...]:
    """Return the end of each document, exclusive; the last is the sequence length."""
    found = ((tokens_S == eod).nonzero().flatten() + 1).tolist()
    length = len(tokens_S)
    return (*found, length) if not found or found[-1] != length else tuple(found)


def positions(tokens_BS: Tensor, eod: int) -> Tensor:
    """Return positions that restart at 0 in every document, [B, S] int64."""
    whole = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    after = torch.zeros_like(tokens_BS)
    after[:, 1:] = torch.where(tokens_BS[:, :-1] == eod, whole[:, 1:], 0)
    return whole - after.cummax(dim=1).values
