"""The task itself; imports torch."""

# B = micro-batch, S = sequence on this rank

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

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

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """The tokens that the loss runs over, on this rank."""
        return self._loss_mask(batch).count_nonzero()

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """The hidden state; on the last pipeline stage the loss, with the tokens it runs over."""
        tensors = batch.tensors
        output: Tensor = model(
            input_ids=tensors["tokens"],
            position_ids=tensors["position_ids"],
            labels=tensors["labels"],
            loss_mask=self._loss_mask(batch),
            attention_mask=tensors.get("attention_mask"),
            document_ends=batch.document_ends,
        )
        if output.dim():  # only the last stage reduces to a scalar
            return output
        return LossSum(output, self.count(context, batch))

    def _loss_mask(self, batch: Batch) -> Tensor:
        """Places are those in the whole sequence, so that a rank that holds a later part of it has
        no context of its own."""
        behind_BS = batch.tensors["position_ids"] >= self.context_tokens
        return batch.tensors["loss_mask"] * behind_BS
