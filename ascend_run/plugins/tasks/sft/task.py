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
    RoleSpec,
    RunContext,
)
from ascend_run.plugins.tasks import SampleTensors, blended_datasets, next_token_loss
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
from ascend_run.text.samples import Conversation

if TYPE_CHECKING:
    from . import SftConfig

_TOKEN_AXES = ("batch", "sequence")


class SftTask:
    """Train one model on conversations with the sum of the losses of the assistant's tokens."""

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"),)
    metrics: Sequence[str] = ()
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
        config, cache, options = context.config, context.cache, self.options
        sources = options.sources("sft", Conversation, options.handler)
        encoder, reader = sources.open_encoder(config), sources.open_reader()
        limit = LengthLimit(max_tokens=config.data.seq_length + 1, too_long=options.too_long)

        def build(paths: Sequence[str], samples: int, shuffles: bool) -> SampleTensors:
            encoded = encoded_sources(
                paths,
                lambda files: encoded_files(files, reader, encoder, limit, cache),
                lambda prefix: encoded_dataset(prefix, limit, cache),
            )
            packed = PackedSamples(
                encoded,
                length=config.data.seq_length,
                pad_id=encoder.tokenizer.pad_id,
                num_samples=samples,
                seed=config.run.seed if shuffles else None,
                packs=options.packing,
            )
            if context.layout.rank == 0:
                _log_dataset(paths, encoded, packed)
            return SampleTensors(packed, self.batch_fields)

        return blended_datasets(context, train_samples, valid_samples, options.shuffle, build)

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
