"""One dataset's samples: documents shuffled, concatenated, split to sequences, shuffled again.

The samples of the first epoch and their order equal those of Megatron's GPTDataset with the same
seed. Each later epoch is shuffled on its own, whereas Megatron shuffles all epochs of a run
together. Every document is thus read once per epoch, and the order of samples does not depend on
the run's length: an extended run continues with the samples that a longer run would have read.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import attrs
import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray
from torch import Tensor

from ascend_run.plugin_api import ArrayCache, Arrays, DataError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers import MegatronTokenizerBase

_NO_PADDING: Final = -1
_EPOCHS_KEPT: Final = 2


class TokenDocuments(Protocol):
    """Documents of token ids: the part of Megatron's ``IndexedDataset`` that samples need."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[documents]. Unit: tokens."""
        ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a part of a document, by default from ``offset`` to its end. Unit: tokens."""
        ...


@attrs.frozen(kw_only=True)
class EpochSettings:
    """How a token stream is split and shuffled."""

    seq_length: int
    seed: int
    eod_mask_loss: bool = False
    eod: int | None = None
    vocab_size: int | None = None  #: Token ids must be below this.

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed of an epoch: the run's for the first, independent ones afterwards."""
        if epoch == 0:
            return self.seed % 2**32  # the range that RandomState accepts
        return int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])


class TokenStream:
    """One dataset's samples, repeated epoch after epoch without end.

    Args:
        num_samples: Length as a dataset: how many are to be read.

    Raises:
        DataError: The dataset has too few tokens for one sample.
    """

    def __init__(
        self,
        prefix: str,
        documents: TokenDocuments,
        settings: EpochSettings,
        cache: ArrayCache,
        num_samples: int,
    ) -> None:
        self.prefix = prefix
        self._num_samples = num_samples
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

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Return sample ``index``, from 0 without an upper bound.

        Raises:
            DataError: A token id is not below the model's vocabulary size.
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
    """One epoch of Megatron's GPTDataset with indices from our own cache.

    Megatron keys its cache by path instead of content, lets only global rank 0 write it, in place,
    and loads it with pickles allowed.
    """

    def __init__(
        self,
        prefix: str,
        documents: TokenDocuments,
        length_digest: str,
        settings: EpochSettings,
        number: int,
        cache: ArrayCache,
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
            # Of which it reads this alone.
            tokenizer=cast("MegatronTokenizerBase", _EndOfDocument(settings.eod)),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=settings.eod_mask_loss,
            create_attention_mask=False,
        )
        everything = np.arange(len(documents.sequence_lengths), dtype=np.int32)
        # It reads these two of its methods alone.
        indexed = cast("IndexedDataset", documents)
        super().__init__(indexed, prefix, everything, None, Split.train, config)

    def _build_document_sample_shuffle_indices(
        self,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return Megatron's three indices, memory-mapped from the cache."""
        arrays = self._cache.arrays(self._description, self._compute)
        return arrays["document"], arrays["sample"], arrays["shuffle"]

    def _compute(self) -> Arrays:
        lengths = cast("IndexedDataset", self.dataset).sequence_lengths
        # Uses Megatron's generator and order of draws, so that the samples are equal.
        random = np.random.RandomState(self.config.random_seed)
        document = self.indices.astype(np.int32)
        random.shuffle(document)
        sample = sample_starts(lengths[document], self.config.sequence_length)
        shuffle = np.arange(len(sample) - 1, dtype=np.uint32)
        random.shuffle(shuffle)
        return {"document": document, "sample": sample, "shuffle": shuffle}


def sample_starts(lengths: NDArray[Any], seq_length: int) -> NDArray[np.int32]:
    """Return where each sample of a document stream starts.

    Args:
        lengths: Tokens in each document, in stream order; documents may be empty.

    Returns:
        Shape ``[samples + 1, 2]``: document and offset of each sample's first token. The last row
        is the last token of the last sample, which is read as a label only.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    positions = np.arange(0, total - (total - 1) % seq_length, seq_length, dtype=np.int64)
    documents = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[documents] - lengths[documents])
    # Both fit int32, which the index also uses for sequences and their lengths.
    starts: NDArray[np.int32] = np.stack([documents, offsets], axis=1).astype(np.int32)
    return starts


@attrs.frozen
class _EndOfDocument:
    """The attributes of a tokenizer that GPTDataset reads."""

    eod: int | None
    pad: int = _NO_PADDING
    vocab_size: None = None

    @property
    def unique_identifiers(self) -> dict[str, object]:
        return {"eod": self.eod}
