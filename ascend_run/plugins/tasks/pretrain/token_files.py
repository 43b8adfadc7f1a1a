"""Token files as the datasets of a task; imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from megatron.core.datasets.indexed_dataset import IndexedDataset

from ascend_run.plugin_api import Datasets, RunContext, SampleBlend
from ascend_run.text.dataset_log import log_dataset
from ascend_run.text.end_of_document import end_of_document
from ascend_run.text.indexed import need_token_files

from .epochs import EpochSettings, TokenDocuments, TokenStream


def token_datasets(
    context: RunContext,
    train_samples: int,
    valid_samples: int,
    documents: Mapping[str, TokenDocuments] | None = None,
) -> Datasets:
    """Return the token files that ``[data]`` names, each concatenated to one stream and split into
    sequences of ``data.seq_length``. Rank 0 logs the size of an epoch of those to train on.

    An item has ``tokens``, ``labels`` (the token after each), ``position_ids`` (int64) and
    ``loss_mask`` (float32), all [sequence]. Without weights, files are read in proportion to their
    tokens.

    Args:
        train_samples, valid_samples: As passed to ``Task.datasets``.
        documents: Those of names in ``[data]`` that have no token files.

    Raises:
        DataError: A dataset has neither token files nor documents, or too few tokens for one
            sample.
    """
    documents = documents or {}
    data = context.config.data
    train = _streams(context, data.train, train_samples, documents)
    validation = _streams(context, data.validation, valid_samples, documents)
    for stream in train if context.layout.rank == 0 else ():
        log_dataset([stream.prefix], samples=stream.samples_per_epoch, tokens=stream.tokens)
    return Datasets(
        train=_blend(train, data.train_weights),
        validation=_blend(validation, data.validation_weights) if validation else None,
    )


def _streams(
    context: RunContext,
    prefixes: tuple[str, ...],
    samples: int,
    documents: Mapping[str, TokenDocuments],
) -> tuple[TokenStream, ...]:
    if not prefixes:
        return ()
    config = context.config
    settings = EpochSettings(
        seq_length=config.data.seq_length,
        seed=config.run.seed,
        eod_mask_loss=config.data.eod_mask_loss,
        eod=end_of_document(config, prefixes) if config.data.eod_mask_loss else None,
        vocab_size=config.model.vocab_size,
    )
    return tuple(
        TokenStream(
            prefix,
            documents[prefix] if prefix in documents else _open_documents(prefix),
            settings,
            context.cache,
            samples,
        )
        for prefix in prefixes
    )


def _blend(streams: tuple[TokenStream, ...], weights: tuple[float, ...]) -> SampleBlend:
    in_proportion = tuple(float(stream.tokens) for stream in streams)
    return SampleBlend(datasets=streams, weights=weights or in_proportion)


def _open_documents(prefix: str) -> TokenDocuments:
    need_token_files(prefix)
    return cast("TokenDocuments", IndexedDataset(prefix, multimodal=False, mmap=True))
