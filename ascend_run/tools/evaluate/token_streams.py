"""Files of text, and token files, as streams of token ids: those that ``pretrain`` reads.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import ConfigError, DataError, NoCache
from ascend_run.text.dataset_paths import bin_path, idx_path, is_source
from ascend_run.text.document_files import OptionNames
from ascend_run.text.text_source import TextSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ascend_run.text.tokenizer import TextTokenizer

_OPTIONS: Final = OptionNames(skip_undecodable=None)


@attrs.frozen(kw_only=True)
class DataOptions:
    """How files of text are read."""

    format: str = "auto"
    key: str = "text"
    """Key of the text in a record."""
    append_eod: bool = True
    """Append the end-of-document token to every document."""


@attrs.frozen(kw_only=True, eq=False)
class TokenStream:
    """The documents of one name, concatenated."""

    name: str
    documents: int
    ids: NDArray[Any]
    """[tokens]; at least two."""


def token_streams(
    names: Sequence[str], options: DataOptions, tokenizer: TextTokenizer | None
) -> list[TokenStream]:
    """Read files and folders of text, and token files named by their prefix.

    Documents and ids are those of ``pretrain``: duplicates and empty documents are dropped, a
    special token that a text spells is text.

    Args:
        tokenizer: Of the model; None: text cannot be read.

    Raises:
        DataError: A name has no data, or bad rows; lists those of all names.
        ConfigError: The end of a document is to be appended, and the tokenizer has none.
    """
    if tokenizer is not None:
        tokenizer = _of_documents(tokenizer)
        if options.append_eod and tokenizer.eod is None and any(map(is_source, names)):
            raise ConfigError(
                "the tokenizer has no end-of-document token that is known; say --no-append-eod"
            )
    found: list[TokenStream] = []
    problems: list[str] = []
    for name in names:
        try:
            found.append(_stream(name, options, tokenizer))
        except DataError as error:
            problems += error.problems or [error.headline]
    if problems:
        raise DataError("these files cannot be evaluated", problems)
    return found


def _of_documents(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return a tokenizer for which special tokens in a text are text, unlike in prompts."""
    from ascend_run.text.documents import DocumentEncoder

    return attrs.evolve(tokenizer, encoder=DocumentEncoder(tokenizer.encoder.content))


def _stream(name: str, options: DataOptions, tokenizer: TextTokenizer | None) -> TokenStream:
    """
    Raises:
        DataError: There is no data of this name, or it cannot be read.
    """
    if is_source(name):
        from ascend_run.text.encoded_documents import encoded_documents

        assert tokenizer is not None
        source = TextSource(
            path=name,
            format=options.format,
            key=options.key,
            append_eod=options.append_eod,
            options=_OPTIONS,
        )
        documents = encoded_documents(source, tokenizer, NoCache())
        count, ids = len(documents.sequence_lengths), documents.ids
    elif bin_path(name).exists() or idx_path(name).exists() or name.endswith((".bin", ".idx")):
        from ascend_run.text.indexed import read_index

        index = read_index(name)
        _require_enough(name, index.tokens)
        count, ids = index.documents, index.ids()
    else:
        raise DataError(
            f"{name}: no such file or folder, and no token files of this prefix ({name}.bin)"
        )
    _require_enough(name, len(ids))
    return TokenStream(name=name, documents=count, ids=ids)


def _require_enough(name: str, num_tokens: int) -> None:
    """
    Raises:
        DataError: There is no token to predict.
    """
    if num_tokens < 2:
        raise DataError(f"{name} has {num_tokens} tokens; a perplexity needs two: name more text")
