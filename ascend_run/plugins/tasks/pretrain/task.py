"""The pretraining task; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from ascend_run.plugin_api import (
    Batch,
    BatchField,
    Datasets,
    LossSum,
    RunContext,
    TokenBlend,
)
from ascend_run.plugins.tasks import next_token_loss

_TOKEN_AXES = ("batch", "sequence")


class PretrainTask:
    """Train one model on token files with the sum of next-token losses."""

    roles: Sequence[str] = ("policy",)
    batch_fields: Mapping[str, BatchField] = MappingProxyType(
        {
            name: BatchField(axes=_TOKEN_AXES)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
    )

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the blends that ``[data]`` names."""
        data = context.config.data
        validation = TokenBlend(prefixes=data.validation, weights=data.validation_weights)
        return Datasets(
            train=TokenBlend(prefixes=data.train, weights=data.train_weights),
            validation=validation if data.validation else None,
        )

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the loss sum and token count."""
        return next_token_loss(model, batch)
