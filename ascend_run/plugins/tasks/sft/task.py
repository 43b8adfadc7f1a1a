"""The fine-tuning task; imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from ascend_run.plugin_api import (
    Batch,
    BatchField,
    Datasets,
    LossSum,
    RunContext,
    SampleBlend,
)
from ascend_run.plugins.tasks import next_token_loss
from ascend_run.text.encoding import Encoded, LengthLimit, encoded_dataset, encoded_files, joined
from ascend_run.text.omissions import left_out_reasons
from ascend_run.text.packing import pack
from ascend_run.text.sample_files import is_sample_dataset, read_sample_record
from ascend_run.text.sources import find_sources

from .sources import open_encoder, open_reader

if TYPE_CHECKING:
    from . import SftConfig

_TOKEN_AXES = ("batch", "sequence")


class SftTask:
    """Train one model on conversations with the sum of the losses of the assistant's tokens."""

    roles: Sequence[str] = ("policy",)
    batch_fields: Mapping[str, BatchField] = MappingProxyType(
        {
            name: BatchField(axes=_TOKEN_AXES)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
    )

    def __init__(self, options: SftConfig) -> None:
        self.options = options

    def datasets(self, context: RunContext, train_samples: int, valid_samples: int) -> Datasets:
        """Return the conversations that ``[data]`` names, epoch after epoch.

        Raises:
            DataError: A file, a row, the tokenizer or the template cannot be used.
        """
        config = context.config
        encoder = open_encoder(config, self.options)
        limit = LengthLimit(max_tokens=config.data.seq_length + 1, too_long=self.options.too_long)

        reader = open_reader(self.options)

        def parts(paths: Sequence[str]) -> Iterator[Encoded]:
            """Yield what is encoded of neighbours of one kind."""
            for is_dataset, some in groupby(paths, is_sample_dataset):
                if is_dataset:
                    yield from (encoded_dataset(path, limit, context.cache) for path in some)
                else:
                    files, _ = find_sources(some)
                    yield encoded_files(files, reader, encoder, limit, context.cache)

        def build(paths: Sequence[str], samples: int, shuffles: bool) -> Conversations:
            encoded = joined([*parts(paths)])
            conversations = Conversations(
                encoded,
                length=config.data.seq_length,
                pad_id=encoder.tokenizer.pad_id,
                num_samples=samples,
                seed=config.run.seed if shuffles else None,
                packs=self.options.packing,
            )
            if context.layout.rank == 0:
                _log_dataset(paths, encoded, conversations)
            return conversations

        def blend(
            files: Sequence[str], weights: tuple[float, ...], samples: int, shuffles: bool
        ) -> Conversations | SampleBlend | None:
            if not files:
                return None
            if not weights:
                return build(files, samples, shuffles)
            each = tuple(build([file], samples, shuffles) for file in files)
            return SampleBlend(datasets=each, weights=weights)

        data = config.data
        return Datasets(
            train=blend(data.train, data.train_weights, train_samples, self.options.shuffle),
            validation=blend(data.validation, data.validation_weights, valid_samples, False),
        )

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        """Return the hidden state; on the last pipeline stage, the loss sum and token count."""
        return next_token_loss(model, batch)


class Conversations:
    """A map-style dataset of padded samples that repeats for as many epochs as needed.

    Sample i depends on the files, the seed and i alone, so a run that is extended or resumed
    continues with the samples that it would have read anyway.

    Args:
        length: Length of every sample. Unit: tokens.
        pad_id: Pads the tokens and the labels; padding is masked out of the loss.
        num_samples: Number of samples that will be read.
        seed: Seed of the order of each epoch; None keeps the order of the files.
        packs: Whether a sample holds as many conversations as fit. Their grouping is the same in
            every epoch, so that it can be reported; positions restart at 0 in each.
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
    ) -> None:
        self._encoded, self._length, self._pad_id = encoded, length, pad_id
        if packs:
            self.packs = pack(encoded.lengths.tolist(), length)
        else:
            self.packs = [[number] for number in range(len(encoded))]
        self._num_samples, self._seed = num_samples, seed
        self._epoch: tuple[int, np.ndarray[Any, Any]] | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        epoch, place = divmod(index, len(self.packs))
        held = self.packs[int(self._order(epoch)[place])]
        tokens = torch.full((self._length,), self._pad_id, dtype=torch.int64)
        labels = tokens.clone()
        loss_mask = torch.zeros(self._length, dtype=torch.float32)
        position_ids = torch.arange(self._length)
        begin = 0
        for number in held:
            ids, trained = self._encoded[number]
            end = begin + len(ids) - 1
            whole = torch.from_numpy(ids.astype(np.int64))
            tokens[begin:end], labels[begin:end] = whole[:-1], whole[1:]
            loss_mask[begin:end] = torch.from_numpy(trained[1:].astype(np.float32))
            position_ids[begin:] = torch.arange(self._length - begin)
            begin = end
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
        }

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.arange(len(self.packs))
            if self._seed is not None:
                digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
                # numpy guarantees that the stream of this generator never changes.
                np.random.RandomState(int.from_bytes(digest[:4], "little")).shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1]


def _log_dataset(paths: Sequence[str], encoded: Encoded, conversations: Conversations) -> None:
    """Log what was read, and what was left out."""
    log = structlog.get_logger()
    report = encoded.report
    recorded = [
        read_sample_record(path).report.left_out for path in paths if is_sample_dataset(path)
    ]
    log.info(
        "sft.data",
        files=[*paths],
        conversations=report.conversations,
        samples=len(conversations.packs),
        tokens=len(encoded.ids),
        trained_tokens=int(encoded.trained.sum()),
        left_out=[why for each in (*recorded, report.left_out) for why in left_out_reasons(each)],
    )
    for reason in left_out_reasons(report.left_out):
        log.warning("sft.left_out", reason=reason)
