"""The task of process rewards; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ascend_run.ops.rating_loss import rating_loss
from ascend_run.plugin_api import Batch, BatchField, Datasets, LossSum, RoleSpec, RunContext
from ascend_run.plugins.tasks.shared.fields import DOCUMENT_FIELDS
from ascend_run.plugins.tasks.shared.lengths import longest_document
from ascend_run.plugins.tasks.shared.losses import num_trained
from ascend_run.plugins.tasks.shared.samples import packed_datasets
from ascend_run.text.fields import RewardTokens
from ascend_run.text.rated_steps import StepLimit, step_encoding
from ascend_run.text.samples import ProcessReward

if TYPE_CHECKING:
    from . import PrmConfig


class PrmTask:
    """Train one model to rate the steps of solutions."""

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"),)
    metrics: Sequence[str] = ("accuracy",)
    batch_fields: Mapping[str, BatchField] = DOCUMENT_FIELDS
    """``loss_mask`` selects the placeholders, whose labels are the tokens of ratings."""

    def __init__(self, options: PrmConfig) -> None:
        self.options = options
        self._ratings: tuple[int, ...] = ()

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the solutions that ``[data]`` names, epoch after epoch.

        Raises:
            DataError: A file, a row, the tokenizer or the template cannot be used.
        """
        options = self.options
        limit = StepLimit(
            max_tokens=longest_document(context.config),
            too_long=options.too_long,
            placeholder=options.placeholder_token,
            rewards=options.reward_tokens,
        )
        samples, fields = (train_samples, valid_samples), self.batch_fields.keys()
        return packed_datasets("prm", options, context, *samples, step_encoding(limit), fields)

    def count(self, context: RunContext, batch: Batch) -> Tensor:
        """Return the number of steps on this rank."""
        return num_trained(batch)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the sum of the losses of steps, and
        their number."""
        tensors, ratings = batch.tensors, self._tokens_of_ratings(context)
        labels_BS, mask_BS = tensors["labels"], tensors["loss_mask"]
        output: Tensor = model(
            input_ids=tensors["tokens"],
            position_ids=tensors["position_ids"],
            labels=labels_BS.new_tensor(ratings).expand(*labels_BS.shape, -1),
            loss_mask=mask_BS,
            attention_mask=tensors.get("attention_mask"),
            document_ends=batch.document_ends,
            reduction="none",
        )
        if output.dim() != 2:
            return output
        wanted_P = labels_BS.t()[mask_BS.t() > 0]
        rating_P = (wanted_P[:, None] == labels_BS.new_tensor(ratings)).int().argmax(1)
        loss_P, is_right_P = rating_loss(-output, rating_P)
        count, right = num_trained(batch), is_right_P.double().sum()
        return LossSum(loss_P.sum(), count, metrics={"accuracy": (right, count)})

    def _tokens_of_ratings(self, context: RunContext) -> tuple[int, ...]:
        if not self._ratings:
            options = self.options
            encoder = options.sources("prm", ProcessReward).open_encoder(context.config)
            tokens = RewardTokens.of(
                encoder.tokenizer, options.placeholder_token, options.reward_tokens
            )
            self._ratings = tuple(tokens.ids[text] for text in options.reward_tokens)
        return self._ratings
