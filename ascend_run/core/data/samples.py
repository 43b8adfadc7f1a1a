"""Open a run's datasets, blend them by weight and cache their indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import structlog
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor

from ascend_run.plugin_api import (
    ArrayCache,
    Arrays,
    Datasets,
    HookError,
    PlatformError,
    RunConfig,
    SampleBlend,
    TokenBlend,
    TokenDocuments,
)
from ascend_run.text.end_of_document import end_of_document
from ascend_run.text.indexed import need_token_files
from ascend_run.types.data import Samples

from .epochs import EpochSettings, TokenStream
from .index_cache import IndexCache


class Stream(Protocol):
    """An unbounded, indexable source of samples (named tensors)."""

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]: ...


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
        DataError: A dataset has too few tokens for one sample.
        StorageError: ``data.cache_dir`` cannot be written.
    """
    if datasets.train is None and train_samples:
        raise HookError(
            f"ascend_task: the task '{config.task}' returned no training dataset, but the run "
            f"reads {train_samples} samples; return one from datasets(), or set train.train_iters=0"
        )
    cache = IndexCache.of_run(config)

    def build(wanted: TokenBlend | SampleBlend | Samples | None, samples: int) -> Samples | None:
        if isinstance(wanted, TokenBlend):
            return build_blend(config, wanted, samples, cache)
        if isinstance(wanted, SampleBlend):
            return BlendedSamples(wanted.datasets, wanted.weights, samples, cache)
        return wanted

    return BuiltDatasets(
        build(datasets.train, train_samples), build(datasets.validation, valid_samples)
    )


def build_blend(config: RunConfig, blend: TokenBlend, samples: int, cache: ArrayCache) -> Samples:
    """Build the first ``samples`` samples of one or several datasets.

    Raises:
        DataError: A dataset has no token files and the task has no documents of it.
    """
    settings = EpochSettings(
        seq_length=config.data.seq_length,
        seed=config.run.seed,
        eod_mask_loss=config.data.eod_mask_loss,
        eod=end_of_document(config, blend.prefixes) if config.data.eod_mask_loss else None,
        vocab_size=config.model.vocab_size,
    )
    sources = [
        TokenStream(prefix, _documents(prefix, blend), settings, cache) for prefix in blend.prefixes
    ]
    weights = blend.weights or [float(source.tokens) for source in sources]
    return BlendedSamples(sources, weights, samples, cache)


def _documents(prefix: str, blend: TokenBlend) -> TokenDocuments:
    if prefix in blend.documents:
        return blend.documents[prefix]
    need_token_files(prefix)
    return cast("TokenDocuments", IndexedDataset(prefix, multimodal=False, mmap=True))


class BlendedSamples:
    """Blend datasets by weight, exact to one sample in every prefix.

    Args:
        weights: Positive; need not sum to 1.
        samples: Length of the blend.
    """

    def __init__(
        self,
        sources: Sequence[Stream],
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

    def log_sources(self) -> None:
        """Log the size of an epoch of each token file."""
        for source in self._sources:
            if isinstance(source, TokenStream):
                size = {"samples": source.samples_per_epoch, "tokens": source.tokens}
                structlog.get_logger().info("data.stream", files=[source.prefix], **size)

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
