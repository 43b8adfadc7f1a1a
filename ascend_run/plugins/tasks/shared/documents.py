"""Rows whose documents are kept apart, and sums over each document; imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from ascend_run.ops.transfer.document_sums import document_sums
from ascend_run.plugin_api import Batch, RunContext


def separate_documents(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Keep the documents of every sample apart: add where they end, and number them through the
    rows of a micro-batch, which core joins.

    Batches have ``documents``, [B, S]: the index of each token's document in its row, from 0.
    """
    for batch in batches:
        documents_BS = batch.tensors["documents"]
        length = documents_BS.shape[1]
        ends = tuple(
            (*((row[1:] != row[:-1]).nonzero().flatten() + 1).tolist(), length)
            for row in documents_BS
        )
        counts_B = documents_BS[:, -1] + 1
        numbered_BS = documents_BS + (torch.cumsum(counts_B, 0) - counts_B)[:, None]
        yield attrs.evolve(
            batch, tensors={**batch.tensors, "documents": numbered_BS}, row_ends=ends
        )


def sums_of_documents(context: RunContext, batch: Batch, values_BS: Tensor) -> Tensor:
    """Return the sum of each document of a micro-batch, [D], over the ranks that share it."""
    assert batch.document_ends is not None
    number = len(batch.document_ends)
    return document_sums(values_BS, batch.tensors["documents"], number, context.groups.cp)
