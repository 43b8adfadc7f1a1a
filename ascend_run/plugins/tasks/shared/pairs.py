"""What is alike in tasks that train on pairs of answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from ascend_run.plugin_api import (
    Datasets,
    LossSum,
    ReportPanel,
    RunConfig,
    RunContext,
    hookimpl,
)

from .fields import DOCUMENT_FIELDS
from .lengths import length_problems, longest_document
from .samples import data_problems, label_problems, packed_datasets

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.plugin_api import Batch
    from ascend_run.plugin_api import contracts as c
    from ascend_run.text.sample_options import PairOptions, PreferenceOptions


PAIR_FIELDS: Final = DOCUMENT_FIELDS
"""Fields of a batch of pairs: each is two documents of a row, chosen and rejected."""


class PairTaskPlugin:
    """A task whose batches are packed pairs."""

    @hookimpl
    def ascend_batch(self) -> c.Wrapper[c.BatchIterator]:
        from .documents import separate_documents

        return separate_documents


def pair_problems(
    task: str, config: RunConfig, options: PairOptions, *, num_labels: int | None = None
) -> list[str]:
    """Return everything that keeps a run from training on the pairs that it names.

    Args:
        num_labels: Labels of the score head; None for an output layer.
    """
    from ascend_run.text.samples import Preference

    problems = [*label_problems(task, config, num_labels)]
    if depths := config.model.mtp_num_layers:
        problems.append(
            f"{task}: model.mtp_num_layers={depths} predicts further tokens, for which pairs have "
            "no loss; set it to 0"
        )
    return [
        *problems,
        *length_problems(task, config, packs=True, can_unpack=False),
        *data_problems(task, config, "pairs"),
        *options.sources(task, Preference).problems(config),
    ]


def smoothing_problems(
    task: str, options: PreferenceOptions, loss: str, smoothed: Collection[str]
) -> Iterator[str]:
    """Yield the problem of a smoothing that a loss does not have.

    Args:
        loss: That of the run.
        smoothed: The losses that have one.
    """
    if (smoothing := options.label_smoothing) and loss not in smoothed:
        yield (
            f"{task}: plugins.{task}.label_smoothing={smoothing} has no meaning with "
            f"plugins.{task}.loss={loss}; leave it out, or use {' or '.join(smoothed)}"
        )


def pair_panels(log_probabilities: str) -> list[ReportPanel]:
    """Return the charts of a task that trains on pairs.

    Args:
        log_probabilities: Title of the chart of ``logps``.
    """
    return [
        *reward_panels(),
        ReportPanel(title=log_probabilities, metrics=("logps/chosen", "logps/rejected")),
        ReportPanel(
            title="Lengths of answers",
            metrics=("lengths/chosen", "lengths/rejected"),
            unit="tokens",
        ),
    ]


def reward_panels() -> list[ReportPanel]:
    """Return the charts of the rewards of pairs."""
    accuracy = "rewards/accuracies"
    return [
        ReportPanel(
            title="Rewards of answers",
            metrics=("rewards/chosen", "rewards/rejected", "rewards/margins"),
        ),
        ReportPanel(
            title="Pairs whose chosen answer has the larger reward",
            metrics=(accuracy, f"eval_{accuracy}"),
            unit="share",
        ),
    ]


def pair_datasets(
    task: str,
    options: PairOptions,
    context: RunContext,
    train_samples: int,
    valid_samples: int,
    fields: Collection[str] = PAIR_FIELDS.keys(),
    shift: int = 1,
) -> Datasets:
    """Return the pairs that ``[data]`` names, epoch after epoch.

    Args:
        fields: Those of ``PackedSample`` that an item has.
        shift: See ``PackedSamples``.

    Raises:
        DataError: A file, a row, the tokenizer or the template cannot be used.
    """
    from ascend_run.text.pairs import PairLimit, pair_encoding

    limit = PairLimit(
        max_positions=context.config.data.seq_length,
        max_of_each=longest_document(context.config),
        shift=shift,
        too_long=options.too_long,
        equal_answers=options.equal_answers,
    )
    encoding = pair_encoding(limit)
    return packed_datasets(task, options, context, train_samples, valid_samples, encoding, fields)


def pair_loss_sum(
    context: RunContext, batch: Batch, loss_P: Tensor, metrics: Mapping[str, Tensor]
) -> LossSum:
    """Return the sum over pairs of their losses and metrics, and their number.

    Every rank that shares the sequence has the losses of all pairs, with the gradients of its own
    tokens; the first one counts them.
    """
    from .losses import num_trained

    loss, count = loss_P.sum(), num_pairs(context, batch)
    sums = {name: value_P.detach().double().sum() for name, value_P in metrics.items()}
    if context.groups.cp.rank():
        loss = loss - loss.detach()
        sums = {name: value.new_zeros(()) for name, value in sums.items()}
    return LossSum(
        loss,
        count,
        tokens=num_trained(batch),
        metrics={name: (value, count) for name, value in sums.items()},
    )


def num_pairs(context: RunContext, batch: Batch) -> Tensor:
    """Return the number of pairs of a micro-batch that this rank counts, of those that share it."""
    import torch

    assert batch.document_ends is not None
    number = 0 if context.groups.cp.rank() else len(batch.document_ends) // 2
    return torch.tensor(number, device=batch.tensors["documents"].device)
