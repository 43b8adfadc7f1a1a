"""Training tasks: datasets, batches and the loss; and what those share that predict tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.plugin_api import Batch, LossSum

if TYPE_CHECKING:
    from torch import Tensor, nn


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor | LossSum:
    """Return the hidden state [S, B, H]; on the last pipeline stage, the sum of the losses of the
    tokens that ``loss_mask`` selects, and their number."""
    import torch

    tensors = batch.tensors
    output: Tensor = model(
        input_ids=tensors["tokens"],
        position_ids=tensors["position_ids"],
        labels=tensors["labels"],
        loss_mask=tensors["loss_mask"],
        attention_mask=tensors.get("attention_mask"),
        document_ends=batch.document_ends,
    )
    if output.dim():  # only the last stage reduces to a scalar
        return output
    return LossSum(output, tensors["loss_mask"].sum(dtype=torch.int64))
