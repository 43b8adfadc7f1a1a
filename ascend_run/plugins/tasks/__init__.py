"""Training tasks: datasets, batches and the loss; and what those share that predict tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api import (
    Batch,
    BatchField,
    Datasets,
    LossSum,
    ReportPanel,
    RunConfig,
    RunContext,
    SampleBlend,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ascend_run.text.packed_samples import PackedSamples
    from ascend_run.text.sample_options import PairOptions


PAIR_FIELDS: Final[Mapping[str, BatchField]] = MappingProxyType(
    {
        name: BatchField(axes=("batch", "sequence"))
        for name in ("tokens", "labels", "loss_mask", "position_ids", "documents")
    }
)
"""Fields of a batch of pairs: each is two documents of a row, chosen and rejected."""


def data_problems(task: str, config: RunConfig, files: str) -> Iterator[str]:
    """Yield what is missing in ``[data]``.

    Args:
        files: What the files hold.
    """
    data = config.data
    if not data.train and config.train.train_iters:
        yield (
            f"{task}: data.train is empty; name files of {files}, as in data.train=data/train.jsonl"
        )
    if config.train.eval_interval and not data.validation:
        yield (
            f"{task}: train.eval_interval is {config.train.eval_interval}, but data.validation is "
            "empty; name a held-out file, or set train.eval_interval=0"
        )


def pair_problems(task: str, config: RunConfig, options: PairOptions) -> list[str]:
    """Return everything that keeps a run from training on the pairs that it names."""
    from ascend_run.text.samples import Preference

    problems = []
    if depths := config.model.mtp_num_layers:
        problems.append(
            f"{task}: model.mtp_num_layers={depths} predicts further tokens, for which pairs have "
            "no loss; set it to 0"
        )
    problems += [
        f"{task}: model.{name}={config.model[name]} is a sum over tokens, and the loss a mean over "
        "pairs; set it to 0"
        for name in _router_losses(config)
        if config.model[name]
    ]
    if (scaling := config.model.rope_scaling_type) in ("dynamic", "longrope"):
        problems.append(
            f"{task}: model.rope_scaling_type={scaling} depends on the length of a row, and a row "
            "holds several answers; use another one"
        )
    return [
        *problems,
        *data_problems(task, config, "pairs"),
        *options.sources(task, Preference, options.handler).problems(config),
    ]


def _router_losses(config: RunConfig) -> Iterator[str]:
    """Yield the coefficients of the routers' losses that the model has."""
    if config.model.num_moe_experts:
        if config.model.moe_router_load_balancing_type in ("aux_loss", "seq_aux_loss"):
            yield "moe_aux_loss_coeff"
        yield "moe_z_loss_coeff"


def pair_panels(log_probabilities: str) -> list[ReportPanel]:
    """Return the charts of a task that trains on pairs.

    Args:
        log_probabilities: Title of the chart of ``logps``.
    """
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
        ReportPanel(title=log_probabilities, metrics=("logps/chosen", "logps/rejected")),
        ReportPanel(
            title="Lengths of answers",
            metrics=("lengths/chosen", "lengths/rejected"),
            unit="tokens",
        ),
    ]


Build = Callable[[Sequence[str], int, bool], "SampleTensors"]
"""From files, the number of samples and whether to shuffle them to their dataset."""


def blended_datasets(
    context: RunContext, train_samples: int, valid_samples: int, shuffle: bool, build: Build
) -> Datasets:
    """Return the data that ``[data]`` names; with weights, a dataset of each file."""

    def blend(
        files: Sequence[str], weights: tuple[float, ...], samples: int, shuffles: bool
    ) -> SampleTensors | SampleBlend | None:
        if not files:
            return None
        if not weights:
            return build(files, samples, shuffles)
        each = tuple(build([file], samples, shuffles) for file in files)
        return SampleBlend(datasets=each, weights=weights)

    data = context.config.data
    return Datasets(
        train=blend(data.train, data.train_weights, train_samples, shuffle),
        validation=blend(data.validation, data.validation_weights, valid_samples, False),
    )


def pair_datasets(
    task: str,
    options: PairOptions,
    context: RunContext,
    train_samples: int,
    valid_samples: int,
    fields: Collection[str],
) -> Datasets:
    """Return the pairs that ``[data]`` names, epoch after epoch.

    Args:
        fields: Those of ``PackedSample`` that an item has.

    Raises:
        DataError: A file, a row, the tokenizer or the template cannot be used.
    """
    from ascend_run.text.packed_pairs import packed_pairs
    from ascend_run.text.samples import Preference

    config = context.config
    sources = options.sources(task, Preference, options.handler)

    def build(paths: Sequence[str], samples: int, shuffles: bool) -> SampleTensors:
        packed = packed_pairs(
            sources,
            config,
            paths,
            too_long=options.too_long,
            packs=options.packing,
            num_samples=samples,
            seed=config.run.seed if shuffles else None,
            cache=context.cache,
            logs=context.layout.rank == 0,
        )
        return SampleTensors(packed, fields)

    return blended_datasets(context, train_samples, valid_samples, options.shuffle, build)


class SampleTensors:
    """A map-style dataset of packed samples as tensors.

    Args:
        fields: Those of ``PackedSample`` that an item has, by its names.
    """

    def __init__(self, samples: PackedSamples, fields: Collection[str]) -> None:
        self.samples, self._fields = samples, fields

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        import torch

        sample = self.samples[index]
        return {name: torch.from_numpy(getattr(sample, name)) for name in self._fields}


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return the hidden state [S, B, H]; on the last pipeline stage, the loss of each token that
    ``loss_mask`` selects, [B, S], and 0 for the others."""
    output: Tensor = _forward(model, batch, reduction="none")
    return output


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor | LossSum:
    """Return the hidden state [S, B, H]; on the last pipeline stage, the sum of the losses of the
    tokens that ``loss_mask`` selects, and their number."""
    import torch

    output = _forward(model, batch)
    if output.dim():  # only the last stage reduces to a scalar
        return output
    return LossSum(output, batch.tensors["loss_mask"].sum(dtype=torch.int64))


def _forward(model: nn.Module, batch: Batch, **options: str) -> Tensor:
    tensors = batch.tensors
    output: Tensor = model(
        input_ids=tensors["tokens"],
        position_ids=tensors["position_ids"],
        labels=tensors["labels"],
        loss_mask=tensors["loss_mask"],
        attention_mask=tensors.get("attention_mask"),
        document_ends=batch.document_ends,
        **options,
    )
    return output


def sums_of_documents(context: RunContext, batch: Batch, values_BS: Tensor) -> Tensor:
    """Return the sum of each document of a micro-batch, [D], over the ranks that share it."""
    from ascend_run.ops.transfer.document_sums import document_sums

    assert batch.document_ends is not None
    number = len(batch.document_ends)
    return document_sums(values_BS, batch.tensors["documents"], number, context.groups.cp)


def pair_loss_sum(
    context: RunContext, batch: Batch, loss_P: Tensor, metrics: Mapping[str, Tensor]
) -> LossSum:
    """Return the sum over pairs of their losses and metrics, and their number.

    Every rank that shares the sequence has the losses of all pairs, with the gradients of its own
    tokens; the first one counts them.
    """
    import torch

    loss = loss_P.sum()
    count = torch.tensor(len(loss_P), device=loss.device)
    sums = {name: value_P.detach().double().sum() for name, value_P in metrics.items()}
    if context.groups.cp.rank():
        loss, count = loss - loss.detach(), torch.zeros_like(count)
        sums = {name: torch.zeros_like(value) for name, value in sums.items()}
    return LossSum(
        loss,
        count,
        tokens=batch.tensors["loss_mask"].sum(dtype=torch.int64),
        metrics={name: (value, count) for name, value in sums.items()},
    )


def separate_documents(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Keep the documents of every sample apart: add where they end, and number them through the
    rows of a micro-batch, which core joins.

    Batches have ``documents``, [B, S]: the index of each token's document in its row, from 0.
    """
    import torch

    for batch in batches:
        documents_BS = batch.tensors["documents"]
        length = documents_BS.shape[1]
        ends = tuple(
            (*((row[1:] != row[:-1]).nonzero().flatten() + 1).tolist(), length)
            for row in documents_BS
        )
        counts_B = documents_BS[:, -1] + 1
        numbered_BS = documents_BS + (torch.cumsum(counts_B, 0) - counts_B)[:, None]
        yield attrs.evolve(
            batch, tensors={**batch.tensors, "documents": numbered_BS}, row_ends=ends
        )
