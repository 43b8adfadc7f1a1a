"""The samples of a task: files of its records, packed into rows of fixed length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ascend_run.plugin_api import Datasets, RunConfig, RunContext, SampleBlend

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.text.packed_samples import PackedSamples
    from ascend_run.text.sample_options import SampleOptions
    from ascend_run.text.task_samples import LimitT, SampleEncoding


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


def label_problems(task: str, config: RunConfig, wanted: int | None = None) -> Iterator[str]:
    """Yield the problem of a model with another output than the task trains.

    Args:
        wanted: Labels of the score head; None for an output layer.
    """
    if (found := config.model.num_labels) == wanted:
        return
    if wanted is None:
        yield (
            f"{task}: model.num_labels={found} is a score head, and {task} trains an output layer; "
            "leave the key out, and name a folder of a model that predicts tokens"
        )
    else:
        yield (
            f"{task}: model.num_labels={found}, and a reward is {wanted} score; name a folder with "
            f"{wanted} label, or of a model that predicts tokens, whose output layer is replaced"
        )


def packed_datasets(
    task: str,
    options: SampleOptions,
    context: RunContext,
    train_samples: int,
    valid_samples: int,
    encoding: SampleEncoding[LimitT],
    fields: Collection[str],
) -> Datasets:
    """Return the samples that ``[data]`` names, epoch after epoch.

    Args:
        fields: Those of ``PackedSample`` that an item has.

    Raises:
        DataError: A file, a row, the tokenizer or the template cannot be used.
    """
    from ascend_run.text.task_samples import packed_samples

    config = context.config
    sources = options.sources(task, encoding.kind)

    def build(paths: Sequence[str], samples: int, shuffles: bool) -> SampleTensors:
        packed = packed_samples(
            sources,
            encoding,
            config,
            paths,
            packs=options.packing,
            num_samples=samples,
            seed=config.run.seed if shuffles else None,
            cache=context.cache,
            logs=context.layout.rank == 0,
        )
        return SampleTensors(packed, fields)

    return _blended_datasets(context, train_samples, valid_samples, options.shuffle, build)


_Build = Callable[[Sequence[str], int, bool], "SampleTensors"]
"""From files, the number of samples and whether to shuffle them to their dataset."""


def _blended_datasets(
    context: RunContext, train_samples: int, valid_samples: int, shuffle: bool, build: _Build
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
        return self.tensors_of(self.samples.pack_of(index))

    def tensors_of(self, pack: int) -> Mapping[str, Tensor]:
        """Return the sample of one of the packs of an epoch."""
        import torch

        sample = self.samples.sample_of(pack)
        return {name: torch.from_numpy(getattr(sample, name)) for name in self._fields}
