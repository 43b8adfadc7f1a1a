"""One dataset's samples: documents shuffled, joined, cut to sequences, shuffled again.

The samples of the first epoch, and their order, are those of Megatron's GPTDataset with the same
seed. Later epochs are shuffled on their own, where Megatron shuffles all epochs of a run together:
so every document is read once an epoch, and the order of samples does not depend on how long the
run is to be. A run that is prolonged goes on with the samples that it would have read anyway.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray
from torch import Tensor

from ascend_run.plugin_api import DataError

from .index_cache import Arrays, IndexCache

_NO_PADDING: Final = -1
_EPOCHS_KEPT: Final = 2


@attrs.frozen(kw_only=True)
class EpochSettings:
    """How a token stream is cut and shuffled."""

    seq_length: int
    seed: int
    eod_mask_loss: bool = False
    eod: int | None = None
    vocab_size: int | None = None
    """Token ids must be below it."""

    def epoch_seed(self, epoch: int) -> int:
        """The run's seed for the first epoch; far from it and from each other afterwards."""
        if epoch == 0:
            return self.seed % 2**32  # what RandomState takes
        return int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])


class TokenStream:
    """One dataset's samples without end, epoch after epoch.

    Raises:
        DataError: It has too few tokens for a single sample.
    """

    def __init__(
        self, prefix: str, documents: Any, settings: EpochSettings, cache: IndexCache
    ) -> None:
        self.prefix = prefix
        self._documents = documents
        self._settings = settings
        self._cache = cache
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()
        self.tokens = int(np.sum(documents.sequence_lengths, dtype=np.int64))
        self.samples_per_epoch = (self.tokens - 1) // settings.seq_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"dataset {prefix} has {self.tokens} tokens, fewer than one sample of "
                f"data.seq_length + 1 = {settings.seq_length + 1}; give more text, or a smaller "
                "data.seq_length"
            )

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Sample number ``index``, from 0 without an upper end.

        Raises:
            DataError: It holds a token id that the model has no embedding for.
        """
        epoch, position = divmod(index, self.samples_per_epoch)
        sample: Mapping[str, Tensor] = self._epoch(epoch)[position]
        limit = self._settings.vocab_size
        if limit is not None:
            seen = max(int(sample["tokens"].max()), int(sample["labels"].max()))
            if seen >= limit:
                raise DataError(
                    f"dataset {self.prefix} holds token id {seen}, but model.vocab_size is "
                    f"{limit}; it was made with another tokenizer, or is corrupt"
                )
        return sample

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            self._epochs[number] = Epoch(
                self.prefix,
                self._documents,
                self._length_digest,
                self._settings,
                number,
                self._cache,
            )
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[number]

    @cached_property
    def _length_digest(self) -> str:
        lengths = np.ascontiguousarray(self._documents.sequence_lengths, dtype="<i4")
        return hashlib.sha256(lengths.data).hexdigest()


class Epoch(GPTDataset):
    """One pass of Megatron's GPTDataset; only the making and keeping of its indices is ours.

    Megatron keys its cache by path rather than content, lets global rank 0 alone write it, in
    place, and reads it with pickles allowed.
    """

    def __init__(
        self,
        prefix: str,
        documents: Any,
        length_digest: str,
        settings: EpochSettings,
        number: int,
        cache: IndexCache,
    ) -> None:
        self._cache = cache
        self._description = {
            "kind": "epoch",
            "sequence_lengths_sha256": length_digest,
            "seq_length": settings.seq_length,
            "seed": settings.epoch_seed(number),
        }
        config = GPTDatasetConfig(
            random_seed=settings.epoch_seed(number),
            sequence_length=settings.seq_length,
            blend=([prefix], None),
            split="1",
            tokenizer=_EndOfDocument(settings.eod),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=settings.eod_mask_loss,
            create_attention_mask=False,
        )
        everything = np.arange(len(documents.sequence_lengths), dtype=np.int32)
        super().__init__(documents, prefix, everything, None, Split.train, config)

    def _build_document_sample_shuffle_indices(
        self,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Megatron's three indices, mapped from the cache."""
        arrays = self._cache.arrays(self._description, self._compute)
        return arrays["document"], arrays["sample"], arrays["shuffle"]

    def _compute(self) -> Arrays:
        lengths = self.dataset.sequence_lengths
        # Megatron's generator and order of draws, so that its samples are ours.
        random = np.random.RandomState(self.config.random_seed)
        document = self.indices.astype(np.int32)
        random.shuffle(document)
        sample = sample_starts(lengths[document], self.config.sequence_length)
        shuffle = np.arange(len(sample) - 1, dtype=np.uint32)
        random.shuffle(shuffle)
        return {"document": document, "sample": sample, "shuffle": shuffle}


def sample_starts(lengths: NDArray[Any], seq_length: int) -> NDArray[np.int32]:
    """Where each sample of a stream of documents begins.

    Args:
        lengths: Tokens in each document, in the order of the stream; documents may be empty.

    Returns:
        [samples + 1, 2]: document and offset of the first token of each sample; the last row is
        that of the last token of the last sample, which is read as a label only.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    positions = np.arange(0, total - (total - 1) % seq_length, seq_length, dtype=np.int64)
    documents = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[documents] - lengths[documents])
    # Both fit: an index counts its sequences and their tokens in int32.
    starts: NDArray[np.int32] = np.stack([documents, offsets], axis=1).astype(np.int32)
    return starts


@attrs.frozen
class _EndOfDocument:
    """The little of a tokenizer that GPTDataset asks for."""

    eod: int | None
    pad: int = _NO_PADDING
    vocab_size: None = None

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"eod": self.eod}
