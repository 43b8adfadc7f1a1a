"""The task itself; imports torch."""

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
    RunContext,
    TokenBlend,
)

_TOKEN_AXES = ("batch", "sequence")


class PretrainTask:
    """One model, token files, and the sum of the next-token losses."""

    roles: Sequence[str] = ("policy",)
    batch_fields: Mapping[str, BatchField] = MappingProxyType(
        {
            name: BatchField(axes=_TOKEN_AXES)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
    )

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """The blends that ``[data]`` names."""
        data = context.config.data
        validation = TokenBlend(prefixes=data.validation, weights=data.validation_weights)
        return Datasets(
            train=TokenBlend(prefixes=data.train, weights=data.train_weights),
            validation=validation if data.validation else None,
        )

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """The hidden state; on the last pipeline stage the loss, with the tokens it runs over."""
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
