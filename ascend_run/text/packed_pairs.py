"""The samples of a task that trains on pairs of answers. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from .encoding import encoded_sources
from .omissions import left_out_reasons
from .packed_samples import PackedSamples
from .pairs import PairLimit, encoded_pair_dataset, encoded_pairs
from .task_sources import TaskSources

if TYPE_CHECKING:
    from ascend_run.plugin_api import ArrayCache, RunConfig


def packed_pairs(
    sources: TaskSources,
    config: RunConfig,
    paths: Sequence[str],
    *,
    too_long: str,
    packs: bool,
    num_samples: int,
    seed: int | None,
    cache: ArrayCache,
    logs: bool,
) -> PackedSamples:
    """Return samples of ``data.seq_length`` tokens; each pair is two of a sample's documents.

    Args:
        paths: Files, and prefixes of token files.
        too_long: See ``PairLimit``.
        packs: Whether a sample holds as many pairs as fit, or one.
        num_samples: Number of samples that will be read.
        seed: Seed of the order of each epoch; None keeps the order of the files.
        logs: Whether to log what was read, and what was left out.

    Raises:
        DataError: A file or a pair cannot be used, or the tokenizer or the template.
    """
    encoder, reader = sources.open_encoder(config), sources.open_reader()
    limit = PairLimit(max_positions=config.data.seq_length, too_long=too_long)
    encoded = encoded_sources(
        paths,
        lambda files: encoded_pairs(files, reader, encoder, limit, cache),
        lambda prefix: encoded_pair_dataset(prefix, limit, cache),
    )
    packed = PackedSamples(
        encoded,
        length=config.data.seq_length,
        pad_id=encoder.tokenizer.pad_id,
        num_samples=num_samples,
        seed=seed,
        packs=packs,
        group=2,
    )
    if logs:
        log, left_out = structlog.get_logger(), [*left_out_reasons(encoded.report.left_out)]
        log.info(
            f"{sources.task}.data",
            files=[*paths],
            pairs=len(encoded) // 2,
            samples=len(packed.packs),
            tokens=len(encoded.ids),
            trained_tokens=int(encoded.trained.sum()),
            left_out=left_out,
        )
        for reason in left_out:
            log.warning(f"{sources.task}.left_out", reason=reason)
    return packed
