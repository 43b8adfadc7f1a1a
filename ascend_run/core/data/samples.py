"""What a run reads: datasets opened, blended in their shares, and indexed once a file system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor

from ascend_run.plugin_api import (
    DataError,
    Datasets,
    PlatformError,
    RunConfig,
    SampleBlend,
    TokenBlend,
)

from .epochs import EpochSettings, TokenStream
from .index_cache import Arrays, IndexCache
from .sidecar import read_sidecar
from .tokenizer import load_tokenizer

Storage = Callable[[str], Any]
"""From a prefix to a sequence of documents with the interface of Megatron's IndexedDataset."""


class Samples(Protocol):
    """A map-style dataset of named tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Tensor]: ...


def build_datasets(
    config: RunConfig,
    datasets: Datasets,
    train_samples: int,
    valid_samples: int,
    storage: Storage | None = None,
) -> Datasets:
    """Replace what a task described as a blend by map-style datasets; needs no process group.

    Args:
        datasets: What ``Task.datasets`` answered.
        train_samples: How many samples will be read; likewise ``valid_samples``.
        storage: What ``ascend_dataset`` answered; default: Megatron's IndexedDataset.

    Raises:
        DataError: A dataset has too few tokens for one sample, or sums up to none.
        StorageError: ``data.cache_dir`` cannot be written.
    """
    open_storage = storage or _open_indexed
    cache = IndexCache(config.data.cache_dir or Path(config.run.output_dir) / "index-cache")

    def build(wanted: Any, samples: int) -> Any:
        if isinstance(wanted, TokenBlend):
            return build_blend(config, wanted, samples, open_storage, cache)
        if isinstance(wanted, SampleBlend):
            return BlendedSamples(wanted.datasets, wanted.weights, samples, cache)
        return wanted

    return Datasets(build(datasets.train, train_samples), build(datasets.validation, valid_samples))


def build_blend(
    config: RunConfig, blend: TokenBlend, samples: int, storage: Storage, cache: IndexCache
) -> Samples:
    """The first ``samples`` samples of one or several datasets."""
    settings = EpochSettings(
        seq_length=config.data.seq_length,
        seed=config.run.seed,
        eod_mask_loss=config.data.eod_mask_loss,
        eod=end_of_document(config, blend.prefixes) if config.data.eod_mask_loss else None,
        vocab_size=config.model.get("vocab_size"),
    )
    sources = [TokenStream(prefix, storage(prefix), settings, cache) for prefix in blend.prefixes]
    weights = blend.weights or [float(source.tokens) for source in sources]
    return BlendedSamples(sources, weights, samples, cache)


class BlendedSamples:
    """Several datasets in given shares, exact to one sample at every point of the order.

    Args:
        weights: Positive; need not add up to 1.
        samples: Length of the blend.
    """

    def __init__(
        self,
        sources: Sequence[Samples],
        weights: Sequence[float],
        samples: int,
        cache: IndexCache,
    ) -> None:
        self._sources = sources
        self._samples = samples
        shares = (np.asarray(weights, dtype=np.float64) / np.sum(weights)).tolist()
        self._arrays: Arrays | None = None
        if len(sources) > 1:
            description = {"kind": "blend", "shares": shares, "samples": samples}
            self._arrays = cache.arrays(description, lambda: _interleave(shares, samples))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        if self._arrays is None:
            return self._sources[0][index]
        source = self._sources[int(self._arrays["source"][index])]
        return source[int(self._arrays["position"][index])]


def _interleave(shares: Sequence[float], samples: int) -> Arrays:
    """Megatron's blending: each sample comes from the source that is furthest behind its share.

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
    helpers.build_blending_indices(source, position, shares, len(shares), samples, False)
    return {"source": source, "position": position}


def end_of_document(config: RunConfig, prefixes: Sequence[str]) -> int:
    """The id of the end-of-document token, from the tokenizer or a dataset's record.

    Raises:
        DataError: Neither names one.
    """
    if config.data.tokenizer is not None:
        eod = load_tokenizer(config.data.tokenizer).eod
        if eod is not None:
            return eod
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is not None and sidecar.eod is not None:
            return sidecar.eod
    raise DataError(
        "no end-of-document token is known, and this run needs it; name the tokenizer with "
        "data.tokenizer=PATH, or leave out what asks for it (data.eod_mask_loss, or a plugin)"
    )


def _open_indexed(prefix: str) -> IndexedDataset:
    return IndexedDataset(prefix, multimodal=False, mmap=True)
