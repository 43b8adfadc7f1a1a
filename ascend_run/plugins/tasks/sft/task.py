"""The fine-tuning task; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import structlog
from torch import Tensor, nn

from ascend_run.plugin_api import (
    Batch,
    BatchField,
    Datasets,
    LossSum,
    RunContext,
    SampleBlend,
)
from ascend_run.plugins.tasks import SampleTensors, next_token_loss
from ascend_run.text.encoding import (
    Encoded,
    LengthLimit,
    encoded_dataset,
    encoded_files,
    encoded_sources,
)
from ascend_run.text.omissions import left_out_reasons
from ascend_run.text.packed_samples import PackedSamples
from ascend_run.text.sample_files import is_sample_dataset, read_sample_record

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

        def build(paths: Sequence[str], samples: int, shuffles: bool) -> SampleTensors:
            encoded = encoded_sources(
                paths,
                lambda files: encoded_files(files, reader, encoder, limit, context.cache),
                lambda prefix: encoded_dataset(prefix, limit, context.cache),
            )
            packed = PackedSamples(
                encoded,
                length=config.data.seq_length,
                pad_id=encoder.tokenizer.pad_id,
                num_samples=samples,
                seed=config.run.seed if shuffles else None,
                packs=self.options.packing,
            )
            if context.layout.rank == 0:
                _log_dataset(paths, encoded, packed)
            return SampleTensors(packed, self.batch_fields)

        def blend(
            files: Sequence[str], weights: tuple[float, ...], samples: int, shuffles: bool
        ) -> SampleTensors | SampleBlend | None:
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


def _log_dataset(paths: Sequence[str], encoded: Encoded, packed: PackedSamples) -> None:
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
        samples=len(packed.packs),
        tokens=len(encoded.ids),
        trained_tokens=int(encoded.trained.sum()),
        left_out=[why for each in (*recorded, report.left_out) for why in left_out_reasons(each)],
    )
    for reason in left_out_reasons(report.left_out):
        log.warning("sft.left_out", reason=reason)
