"""The pretraining task; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
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
from ascend_run.plugins.tasks.shared.losses import next_token_loss, num_trained

from .sources import read_sources

if TYPE_CHECKING:
    from . import PretrainConfig


class PretrainTask:
    """Train one model on token files, or on text, with the sum of next-token losses."""

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"),)
    metrics: Sequence[str] = ()
    batch_fields: Mapping[str, BatchField] = TOKEN_FIELDS

    def __init__(self, options: PretrainConfig) -> None:
        self.options = options

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the blends that ``[data]`` names; text is encoded on the first call.

        Raises:
            DataError: A source or the tokenizer cannot be used.
        """
        from .token_files import token_datasets  # imports Megatron's datasets

        documents = read_sources(context.config, self.options, context.cache)
        for name, encoded in documents.items():
            if context.layout.rank == 0:
                structlog.get_logger().info("pretrain.source", name=name, **encoded.report)
        return token_datasets(context, train_samples, valid_samples, documents)

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """Return the number of trained tokens on this rank."""
        return num_trained(batch)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the loss sum and token count."""
        return next_token_loss(model, batch)
