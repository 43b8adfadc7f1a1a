"""Samples of fixed length made of encoded documents, epoch after epoch. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from .encoding import Encoded
from .packing import documents_of, pack

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen(kw_only=True, eq=False)
class PackedSample:
    """One row of a batch: documents one after another, then padding."""

    tokens: NDArray[np.int64]
    """[length]"""
    labels: NDArray[np.int64]
    """[length] The token that is trained at each position."""
    loss_mask: NDArray[np.float32]
    """[length] 1 where the label is trained, else 0."""
    is_last: NDArray[np.float32]
    """[length] 1 at the last position of each document, else 0."""
    position_ids: NDArray[np.int64]
    """[length] From 0 in each document; padding continues those of the last one."""
    documents: NDArray[np.int64]
    """[length] Index of the document in this sample, from 0; padding has that of the last one."""


class PackedSamples:
    """A map-style dataset of padded samples that repeats for as many epochs as needed.

    Sample i depends on the documents, the seed and i alone, so a run that is extended or resumed
    continues with the samples that it would have read anyway.

    Args:
        length: Length of every sample. Unit: tokens.
        pad_id: Pads the tokens and the labels; padding is masked out of the loss.
        num_samples: Number of samples that will be read.
        seed: Seed of the order of each epoch; None keeps the order of the files.
        packs: Whether a sample holds as many groups as fit. Their grouping is the same in every
            epoch, so that it can be reported; positions restart at 0 in each document.
        group: Number of consecutive documents that a sample holds together, in order: 2 for pairs.
        shift: Positions from a token to the one that it is the label of: 1 for the prediction of
            the next token, so that a document's last token is only a label; 0 otherwise.
    """

    def __init__(
        self,
        encoded: Encoded,
        *,
        length: int,
        pad_id: int,
        num_samples: int,
        seed: int | None,
        packs: bool = False,
        group: int = 1,
        shift: int = 1,
    ) -> None:
        self._encoded, self._length, self._pad_id = encoded, length, pad_id
        self._shift = shift
        self.packs: Sequence[Sequence[int]]
        """The indices of the documents of each sample of an epoch."""
        if packs:
            # Of lengths whose last token takes no position.
            self.packs = pack((encoded.lengths + (1 - shift)).tolist(), length, group)
        else:
            self.packs = [documents_of([n], group) for n in range(len(encoded) // group)]
        self._num_samples, self._seed = num_samples, seed
        self._epoch: tuple[int, NDArray[Any]] | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> PackedSample:
        return self.sample_of(self.pack_of(index))

    def pack_of(self, index: int) -> int:
        """Return which of ``packs`` a sample is."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        epoch, place = divmod(index, len(self.packs))
        return int(self._order(epoch)[place])

    def digest(self) -> str:
        """Return a digest of the samples of an epoch, whatever their order."""
        encoded, found = self._encoded, hashlib.sha256()
        found.update(repr((self._length, self._pad_id, self._shift, self.packs)).encode())
        for array in (encoded.ids, encoded.trained, encoded.ends, encoded.labels):
            found.update(b"" if array is None else np.ascontiguousarray(array).data)
        return found.hexdigest()

    def sample_of(self, pack: int) -> PackedSample:
        """Return the sample of one of ``packs``."""
        held = self.packs[pack]
        tokens = np.full(self._length, self._pad_id, np.int64)
        labels = tokens.copy()
        loss_mask = np.zeros(self._length, np.float32)
        is_last = loss_mask.copy()
        position_ids = np.arange(self._length)
        documents = np.zeros(self._length, np.int64)
        begin = 0
        for number, index in enumerate(held):
            ids, trained = self._encoded[index]
            end = begin + len(ids) - self._shift
            tokens[begin:end] = ids[: end - begin]
            labels[begin:end] = self._encoded.labels_of(index)[self._shift :]
            loss_mask[begin:end] = trained[self._shift :]
            is_last[end - 1] = 1
            position_ids[begin:] = np.arange(self._length - begin)
            documents[begin:] = number
            begin = end
        return PackedSample(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            is_last=is_last,
            position_ids=position_ids,
            documents=documents,
        )

    def _order(self, epoch: int) -> NDArray[Any]:
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.arange(len(self.packs))
            if self._seed is not None:
                digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
                # numpy guarantees that the stream of this generator never changes.
                np.random.RandomState(int.from_bytes(digest[:4], "little")).shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1]
