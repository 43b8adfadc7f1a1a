"""The fine-tuning task; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ascend_run.plugin_api import (
    Batch,
    BatchField,
    Datasets,
    LossSum,
    RoleSpec,
    RunContext,
)
from ascend_run.plugins.tasks.shared.fields import TOKEN_FIELDS
from ascend_run.plugins.tasks.shared.lengths import longest_document
from ascend_run.plugins.tasks.shared.losses import next_token_loss, num_trained
from ascend_run.plugins.tasks.shared.samples import packed_datasets
from ascend_run.text.conversations import conversation_encoding

if TYPE_CHECKING:
    from . import SftConfig


class SftTask:
    """Train one model on conversations with the sum of the losses of the assistant's tokens."""

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"),)
    metrics: Sequence[str] = ()
    batch_fields: Mapping[str, BatchField] = TOKEN_FIELDS

    def __init__(self, options: SftConfig) -> None:
        self.options = options

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the conversations that ``[data]`` names, epoch after epoch.

        Raises:
            DataError: A file, a row, the tokenizer or the template cannot be used.
        """
        options = self.options
        encoding = conversation_encoding(longest_document(context.config), options.too_long)
        return packed_datasets(
            "sft", options, context, train_samples, valid_samples, encoding, self.batch_fields
        )

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """Return the number of trained tokens on this rank."""
        return num_trained(batch)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the loss sum and token count."""
        return next_token_loss(model, batch)
