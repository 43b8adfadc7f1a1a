"""The task itself; imports torch."""

# B = micro-batch, S = sequence on this rank

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ascend_run.plugin_api import (
    Batch,
    BatchField,
    Datasets,
    LossSum,
    RoleSpec,
    RunContext,
)
from ascend_run.plugins.tasks.pretrain.token_files import token_datasets

_TOKEN_AXES = ("batch", "sequence")


class ContextPretrainTask:
    """One model, token files, and the sum of the next-token losses behind the context.

    Args:
        context_tokens: Places at the beginning of a sequence that do not count.
    """

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"),)
    metrics: Sequence[str] = ()
    batch_fields: Mapping[str, BatchField] = MappingProxyType(
        {
            name: BatchField(axes=_TOKEN_AXES)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
    )

    def __init__(self, context_tokens: int) -> None:
        self.context_tokens = context_tokens

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """The blends that ``[data]`` names."""
        return token_datasets(context, train_samples, valid_samples)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """The hidden state; on the last pipeline stage the loss, with the tokens it runs over.

        Places are those in the whole sequence, so that a rank that holds a later part of it has
        no context of its own.
        """
        tensors = batch.tensors
        behind_BS = tensors["position_ids"] >= self.context_tokens
        loss_mask_BS = tensors["loss_mask"] * behind_BS
        output: Tensor = model(
            input_ids=tensors["tokens"],
            position_ids=tensors["position_ids"],
            labels=tensors["labels"],
            loss_mask=loss_mask_BS,
            attention_mask=tensors.get("attention_mask"),
            document_ends=batch.document_ends,
        )
        if output.dim():  # only the last stage reduces to a scalar
            return output
        return LossSum(output, loss_mask_BS.sum(dtype=torch.int64))
