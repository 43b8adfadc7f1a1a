"""The losses of a model that predicts the next token; imports torch."""

from __future__ import annotations

from torch import Tensor, nn

from ascend_run.plugin_api import Batch, LossSum


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return the hidden state [S, B, H]; on the last pipeline stage, the loss of each token that
    ``loss_mask`` selects, [B, S], and 0 for the others."""
    return _forward(model, batch, reduction="none")


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor | LossSum:
    """Return the hidden state [S, B, H]; on the last pipeline stage, the sum of the losses of the
    tokens that ``loss_mask`` selects, and their number."""
    output = _forward(model, batch)
    if output.dim():  # only the last stage reduces to a scalar
        return output
    return LossSum(output, num_trained(batch))


def num_trained(batch: Batch) -> Tensor:
    """Return the number of tokens of a micro-batch, on this rank, whose loss has a weight."""
    return batch.tensors["loss_mask"].count_nonzero()


def _forward(model: nn.Module, batch: Batch, **options: str) -> Tensor:
    tensors = batch.tensors
    output: Tensor = model(
        input_ids=tensors["tokens"],
        position_ids=tensors["position_ids"],
        labels=tensors["labels"],
        loss_mask=tensors["loss_mask"],
        attention_mask=tensors.get("attention_mask"),
        document_ends=batch.document_ends,
        **options,
    )
    return output
