"""Text that is read itself, instead of token files of it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from ascend_run.plugin_api import AscendRunError, DataError
from ascend_run.text.dataset_paths import is_source
from ascend_run.text.document_files import OptionNames
from ascend_run.text.handlers.loading import key_mapping, load_handler
from ascend_run.text.text_source import TextSource

if TYPE_CHECKING:
    from ascend_run.plugin_api import ArrayCache, RunConfig
    from ascend_run.text.encoded_documents import EncodedDocuments
    from ascend_run.text.tokenizer import TextTokenizer

    from . import PretrainConfig

_OPTIONS: Final = OptionNames(
    format="plugins.pretrain.format=",
    key='plugins.pretrain.map_keys=["text=KEY"]',
    skip_undecodable=None,
)


def text_sources(config: RunConfig, options: PretrainConfig) -> Mapping[str, TextSource]:
    """Return what ``[data]`` names and is text, by name.

    Raises:
        ConfigError: The mapping of keys cannot be used.
    """
    names = (*config.data.train, *config.data.validation)
    found = [name for name in dict.fromkeys(names) if is_source(name)]
    keys = key_mapping(load_handler("text"), options.map_keys) if found else {}
    return {
        name: TextSource(
            path=name,
            format=options.format,
            key=keys.get("text", "text"),
            append_eod=options.append_eod,
            options=_OPTIONS,
        )
        for name in found
    }


def source_tokenizer(config: RunConfig, options: PretrainConfig) -> TextTokenizer:
    """Return the tokenizer that encodes sources.

    Raises:
        DataError: None is named, or it cannot be read or has no end-of-document token.
    """
    from ascend_run.text.tokenizer import load_tokenizer  # imports numpy, which no plan needs

    path = config.data.tokenizer
    if path is None:
        raise DataError(
            "data.tokenizer is none, and text is encoded with it; name a tokenizer.json, or make "
            "token files with ascend-run preprocess and name their prefix"
        )
    tokenizer = load_tokenizer(path, options.end_token)
    if options.append_eod and tokenizer.eod is None:
        raise DataError(
            f"tokenizer {path} has no end-of-document token that is known; name one with "
            "plugins.pretrain.end_token, or set plugins.pretrain.append_eod=false"
        )
    return tokenizer


def read_sources(
    config: RunConfig, options: PretrainConfig, cache: ArrayCache
) -> Mapping[str, EncodedDocuments]:
    """Return the documents of all text that ``[data]`` names, by name.

    Raises:
        DataError: A source or the tokenizer cannot be used; lists the bad rows of all sources.
    """
    from ascend_run.text.encoded_documents import encoded_documents  # imports numpy

    sources = text_sources(config, options)
    tokenizer = source_tokenizer(config, options) if sources else None
    found: dict[str, EncodedDocuments] = {}
    problems: list[str] = []
    for name, source in sources.items():
        assert tokenizer is not None
        try:
            found[name] = encoded_documents(source, tokenizer, cache)
        except DataError as error:
            problems += error.problems or [error.headline]
    if problems:
        raise DataError("this run cannot start", [f"pretrain: {problem}" for problem in problems])
    return found


def source_problems(config: RunConfig, options: PretrainConfig) -> Iterator[str]:
    """Yield what is wrong with the text that ``[data]`` names; reads its first documents.

    Bad rows after them are found by ``read_sources``, before the first step.
    """
    try:
        sources = text_sources(config, options)
        if sources:
            source_tokenizer(config, options)
    except AscendRunError as error:
        yield from error.problems or [error.headline]
        return
    for source in sources.values():
        yield from source.problems()
