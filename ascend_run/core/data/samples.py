"""Blend a run's datasets by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from ascend_run.plugin_api import (
    ArrayCache,
    Arrays,
    Datasets,
    HookError,
    PlatformError,
    RunConfig,
    SampleBlend,
    Samples,
)

from .index_cache import IndexCache


class BuiltDatasets(NamedTuple):
    """The datasets of a run."""

    train: Samples | None
    validation: Samples | None


def build_datasets(
    config: RunConfig, datasets: Datasets, train_samples: int, valid_samples: int
) -> BuiltDatasets:
    """Build map-style datasets from the blends that a task describes. Needs no process group.

    Args:
        datasets: Return value of ``Task.datasets``.
        train_samples, valid_samples: Number of samples to be read.

    Raises:
        HookError: The task returned no training dataset, and the run has steps.
        StorageError: ``data.cache_dir`` cannot be written.
    """
    if datasets.train is None and train_samples:
        raise HookError(
            f"ascend_task: the task '{config.task}' returned no training dataset, but the run "
            f"reads {train_samples} samples; return one from datasets(), or set train.train_iters=0"
        )
    cache = IndexCache.of_run(config)

    def build(wanted: SampleBlend | Samples | None, samples: int) -> Samples | None:
        if isinstance(wanted, SampleBlend):
            return BlendedSamples(wanted.datasets, wanted.weights, samples, cache)
        return wanted

    return BuiltDatasets(
        build(datasets.train, train_samples), build(datasets.validation, valid_samples)
    )


class BlendedSamples:
    """Blend datasets by weight, exact to one sample in every prefix.

    Args:
        weights: Positive; need not sum to 1.
        samples: Length of the blend.
    """

    def __init__(
        self,
        sources: Sequence[Samples],
        weights: Sequence[float],
        samples: int,
        cache: ArrayCache,
    ) -> None:
        self._sources = sources
        self._samples = samples
        shares = (np.asarray(weights, dtype=np.float64) / np.sum(weights)).tolist()
        self._arrays: Arrays | None = None
        if len(sources) > 1:
            description = {"kind": "blend", "shares": shares, "samples": samples}
            self._arrays = cache.arrays(description, lambda: interleave(shares, samples))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        if self._arrays is None:
            return self._sources[0][index]
        source = self._sources[int(self._arrays["source"][index])]
        return source[int(self._arrays["position"][index])]


def interleave(shares: Sequence[float], samples: int) -> Arrays:
    """Blend as Megatron does: each sample comes from the source furthest below its share.

    The first samples do not depend on how many follow.

    Raises:
        PlatformError: Megatron's compiled helpers are missing.
    """
    try:
        from megatron.core.datasets import helpers
    except ImportError as error:
        raise PlatformError(
            f"blending datasets needs Megatron's compiled helpers, which are missing ({error}); "
            "install megatron-core with its compiled parts for this Python, or train on one dataset"
        ) from error

    source = np.zeros(samples, dtype=np.int16)
    position = np.zeros(samples, dtype=np.int64)
    build = cast("Any", helpers).build_blending_indices  # in its compiled extension
    build(source, position, shares, len(shares), samples, False)
    return {"source": source, "position": position}
