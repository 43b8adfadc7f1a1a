"""The samples of a task: its files encoded, and packed into rows of fixed length. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import numpy as np
import structlog

from .dataset_log import log_dataset
from .encoder import Encoder
from .encoding import Encoded, encoded_sources
from .omissions import left_out_reasons
from .packed_samples import PackedSamples
from .reading import SampleReader
from .sample_files import is_sample_dataset, read_sample_record
from .samples import Sample
from .task_sources import TaskSources

if TYPE_CHECKING:
    from ascend_run.plugin_api import ArrayCache, RunConfig

LimitT = TypeVar("LimitT")


@attrs.frozen(kw_only=True)
class SampleEncoding(Generic[LimitT]):
    """How samples of one kind become documents."""

    kind: type[Sample]
    name: str
    """In the plural, for messages: ``pairs``."""
    group: int
    """Documents of a sample."""
    shift: int = 1
    """See ``PackedSamples``."""
    limit: LimitT
    """What becomes of samples that are too long; of any type that the functions below take."""
    of_files: Callable[[Sequence[Path], SampleReader, Encoder, LimitT, ArrayCache], Encoded]
    of_dataset: Callable[[str, LimitT, ArrayCache], Encoded]
    """Reads the token files of a prefix."""


def packed_samples(
    sources: TaskSources,
    encoding: SampleEncoding[LimitT],
    config: RunConfig,
    paths: Sequence[str],
    *,
    packs: bool,
    num_samples: int,
    seed: int | None,
    cache: ArrayCache,
    logs: bool,
) -> PackedSamples:
    """Return rows of ``data.seq_length`` tokens.

    Args:
        paths: Files, and prefixes of token files.
        packs: Whether a row holds as many samples as fit, or one.
        num_samples: Number of rows that will be read.
        seed: Seed of the order of each epoch; None keeps the order of the files.
        logs: Whether to log what was read, and what was left out.

    Raises:
        DataError: A file or a sample cannot be used, or the tokenizer or the template.
    """
    encoder, reader = sources.open_encoder(config), sources.open_reader()
    encoded = encoded_sources(
        paths,
        lambda files: encoding.of_files(files, reader, encoder, encoding.limit, cache),
        lambda prefix: encoding.of_dataset(prefix, encoding.limit, cache),
    )
    packed = PackedSamples(
        encoded,
        length=config.data.seq_length,
        pad_id=encoder.tokenizer.pad_id,
        num_samples=num_samples,
        seed=seed,
        packs=packs,
        group=encoding.group,
        shift=encoding.shift,
    )
    if logs:
        _log(sources.task, encoding.name, paths, encoded, packed)
    return packed


def _log(
    task: str, name: str, paths: Sequence[str], encoded: Encoded, packed: PackedSamples
) -> None:
    """Log what was read, and what was left out, also when token files were written."""
    report = encoded.report
    recorded = [
        read_sample_record(path).report.left_out for path in paths if is_sample_dataset(path)
    ]
    log_dataset(
        paths,
        samples=len(packed.packs),
        tokens=len(encoded.ids),
        **{name: report.conversations},
        trained_tokens=int(np.count_nonzero(encoded.trained)),
        left_out=[why for each in (*recorded, report.left_out) for why in left_out_reasons(each)],
    )
    for reason in left_out_reasons(report.left_out):
        structlog.get_logger().warning(f"{task}.left_out", reason=reason)
