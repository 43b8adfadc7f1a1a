"""The task of outcome rewards; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ascend_run.ops.preference_loss import REWARDS, Answers, reward_loss, reward_metrics
from ascend_run.ops.transfer.document_sums import document_sums
from ascend_run.plugin_api import Batch, BatchField, Datasets, LossSum, RoleSpec, RunContext
from ascend_run.plugins.tasks.shared.fields import fields_of_tokens
from ascend_run.plugins.tasks.shared.pairs import num_pairs, pair_datasets, pair_loss_sum

if TYPE_CHECKING:
    from . import OrmConfig


class OrmTask:
    """Train one model with a score head on pairs of answers."""

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"),)
    metrics: Sequence[str] = REWARDS
    batch_fields: Mapping[str, BatchField] = fields_of_tokens(
        "tokens", "loss_mask", "is_last", "position_ids", "documents"
    )
    """``loss_mask`` selects the answers' tokens, which are counted for the speed alone."""

    def __init__(self, options: OrmConfig) -> None:
        self.options = options

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the pairs that ``[data]`` names, epoch after epoch.

        Raises:
            DataError: A file, a row, the tokenizer or the template cannot be used.
        """
        return pair_datasets(
            "orm",
            self.options,
            context,
            train_samples,
            valid_samples,
            fields=self.batch_fields.keys(),
            shift=0,
        )

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """Return the number of pairs on this rank."""
        return num_pairs(context, batch)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the sum of the losses of pairs, and
        their number."""
        tensors = batch.tensors
        output: Tensor = model(
            input_ids=tensors["tokens"],
            position_ids=tensors["position_ids"],
            loss_mask=tensors["is_last"],
            attention_mask=tensors.get("attention_mask"),
            document_ends=batch.document_ends,
        )
        if output.dim() != 2:
            return output
        assert batch.document_ends is not None
        here = tensors["documents"].t()[tensors["is_last"].t() > 0]
        number, ranks = len(batch.document_ends), context.groups.cp
        rewards = Answers.of_documents(document_sums(output.squeeze(1), here, number, ranks))
        options = self.options
        loss_P = reward_loss(
            rewards, margin=options.margin, centering=options.center_rewards_coefficient
        )
        return pair_loss_sum(context, batch, loss_P, reward_metrics(rewards))
