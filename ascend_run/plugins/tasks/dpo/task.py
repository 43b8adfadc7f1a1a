"""The preference task; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
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

from . import BASE

if TYPE_CHECKING:
    from . import DpoConfig

_REFERENCE = "reference"


class DpoTask:
    """Train one model on pairs of answers, beside a frozen reference."""

    metrics: Sequence[str] = METRICS

    def __init__(self, options: DpoConfig) -> None:
        self.options = options
        is_base = options.reference == BASE
        reference = RoleSpec(
            name=_REFERENCE,
            frozen_step=self.reference_step,
            weights=None if is_base else options.reference,
            is_base=is_base,
            ahead=options.precompute_ref_log_probs,
        )
        self.batch_fields: Mapping[str, BatchField] = PAIR_FIELDS
        if reference.ahead:
            self.batch_fields = {**PAIR_FIELDS, _REFERENCE: BatchField(axes=("batch", "sequence"))}
        policy = RoleSpec(name="policy")
        self.roles: Sequence[RoleSpec] = (
            (policy,) if options.reference_free else (policy, reference)
        )

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the pairs that ``[data]`` names, epoch after epoch.

        Raises:
            DataError: A file, a row, the tokenizer or the template cannot be used.
            StorageError: The cache of the reference's log-probabilities cannot be read or written.
        """
        datasets = pair_datasets("dpo", self.options, context, train_samples, valid_samples)
        if not self.options.precompute_ref_log_probs:
            return datasets
        from .cached_reference import with_reference

        return with_reference(context, self.roles[1], datasets)

    def reference_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor:
        """Return the hidden state; on the last pipeline stage, the log-probability of each trained
        token, [B, S]."""
        output = token_losses(model, batch)
        return -output if output.dim() == 2 else output

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """Return the number of pairs on this rank."""
        return num_pairs(context, batch)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the sum of the losses of pairs, and
        their number."""
        output = token_losses(model, batch)
        if output.dim() != 2:
            return output
        mask_BS = batch.tensors["loss_mask"].to(output.dtype)
        policy = Answers.of_documents(sums_of_documents(context, batch, -output))
        lengths = Answers.of_documents(sums_of_documents(context, batch, mask_BS))
        ratios = policy
        if _REFERENCE in batch.tensors:
            # Token by token: rounding errors of long sums are larger than the first margins.
            ratios_BS = -output - batch.tensors[_REFERENCE]
            ratios = Answers.of_documents(sums_of_documents(context, batch, ratios_BS))
        compared = ratios / lengths if self.options.loss == "ipo" else ratios
        loss_P = preference_loss(
            self.options.loss,
            compared.margin_P,
            beta=self.options.beta,
            smoothing=self.options.label_smoothing,
        )
        if self.options.sft_weight:
            loss_P = loss_P - self.options.sft_weight * (policy / lengths).chosen_P
        metrics = preference_metrics(
            rewards=ratios.scaled(self.options.beta), logps=policy, lengths=lengths
        )
        return pair_loss_sum(context, batch, loss_P, metrics)


def log_reference(context: RunContext, options: DpoConfig) -> None:
    """Log where the reference of a run comes from."""
    if options.reference_free:
        weights = "none"
    elif options.reference == BASE:
        weights = BASE
    else:
        weights = context.models[_REFERENCE].weights or "initial"
    structlog.get_logger().info("dpo.reference", weights=weights)
