"""The preference task without a reference; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ascend_run.ops.preference_loss import METRICS, Answers, preference_loss, preference_metrics
from ascend_run.plugin_api import Batch, BatchField, Datasets, LossSum, RoleSpec, RunContext
from ascend_run.plugins.tasks.shared.documents import sums_of_documents
from ascend_run.plugins.tasks.shared.losses import token_losses
from ascend_run.plugins.tasks.shared.pairs import (
    PAIR_FIELDS,
    num_pairs,
    pair_datasets,
    pair_loss_sum,
)

if TYPE_CHECKING:
    from . import SimpoConfig


class SimpoTask:
    """Train one model on pairs of answers, by their mean log-probabilities."""

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"),)
    metrics: Sequence[str] = METRICS
    batch_fields: Mapping[str, BatchField] = PAIR_FIELDS

    def __init__(self, options: SimpoConfig) -> None:
        self.options = options

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the pairs that ``[data]`` names, epoch after epoch.

        Raises:
            DataError: A file, a row, the tokenizer or the template cannot be used.
        """
        return pair_datasets("simpo", self.options, context, train_samples, valid_samples)

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """Return the number of pairs on this rank."""
        return num_pairs(context, batch)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the sum of the losses of pairs, and
        their number."""
        output = token_losses(model, batch)
        if output.dim() != 2:
            return output
        options, mask_BS = self.options, batch.tensors["loss_mask"].to(output.dtype)
        lengths = Answers.of_documents(sums_of_documents(context, batch, mask_BS))
        means = Answers.of_documents(sums_of_documents(context, batch, -output)) / lengths
        loss_P = preference_loss(
            options.loss,
            means.margin_P - options.gamma_beta_ratio,
            beta=options.beta,
            smoothing=options.label_smoothing,
        )
        # Divided by the length once; MindSpeed-LLM divides this term twice.
        if options.sft_weight:
            loss_P = loss_P - options.sft_weight * means.chosen_P
        metrics = preference_metrics(
            rewards=means.scaled(options.beta), logps=means, lengths=lengths
        )
        return pair_loss_sum(context, batch, loss_P, metrics)
