"""Load, train and fingerprint ``tokenizer.json`` files. No transformers, no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import DataError

from .documents import DocumentEncoder
from .tokenizer_content import tokenizer_content

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT: Final = "<|endoftext|>"
"""The end-of-document token (EOD) of tokenizers trained here."""

KNOWN_ENDS: Final = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
"""End-of-document tokens of published tokenizers, in order of preference."""

SMALLEST_VOCABULARY: Final = 257
"""256 bytes and the end-of-document token."""

_SETTINGS: Final = ("truncation", "padding")
"""Keys of tokenizer.json that tools may write and that do not change token ids."""


@attrs.frozen(kw_only=True, eq=False)
class TextTokenizer:
    """A tokenizer for full documents."""

    encoder: DocumentEncoder
    fingerprint: str
    """SHA-256 of the canonical content; see ``fingerprint_of``."""
    vocab_size: int
    """Largest token id plus 1."""
    end_token: str | None
    eod: int | None
    """Id of ``end_token``; None if the tokenizer has no known one."""

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer."""
        return self.encoder.backend

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """Return the content of its ``tokenizer.json``."""
        return self.backend.to_str(pretty=True)


def fingerprint_of(content: str) -> str:
    """Return the SHA-256 of what determines token ids, without key order, spacing or run settings.

    Raises:
        ValueError: The content is not a JSON object.
    """
    values = json.loads(content)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    kept = {key: value for key, value in values.items() if key not in _SETTINGS}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def load_tokenizer(path: Path | str, end_token: str | None = None) -> TextTokenizer:
    """Read a ``tokenizer.json`` or a SentencePiece model, or that of a folder.

    Args:
        end_token: The end-of-document token; default: the first of ``KNOWN_ENDS`` it contains.

    Raises:
        DataError: The file is missing, not a tokenizer, or has no ``end_token``.
    """
    path = Path(path)
    try:
        content, path = tokenizer_content(path)
    except FileNotFoundError:
        raise DataError(
            f"tokenizer {path} does not exist; name a tokenizer.json, or train one with "
            "ascend-run preprocess --train-tokenizer VOCAB_SIZE"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read tokenizer {path}: {error}") from error
    return _from_content(content, str(path), end_token)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; bytes as in GPT-2).

    Every text is encoded without loss. A small corpus may yield fewer than ``vocab_size`` tokens.

    Raises:
        DataError: ``vocab_size`` is below ``SMALLEST_VOCABULARY``.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"a byte-level tokenizer of {vocab_size} tokens cannot hold 256 bytes and the end of "
            f"a document; ask for at least {SMALLEST_VOCABULARY}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _from_content(backend.to_str(), "the trained tokenizer", END_OF_DOCUMENT)


def _from_content(content: str, name: str, end_token: str | None) -> TextTokenizer:
    try:
        fingerprint = fingerprint_of(content)
        encoder = DocumentEncoder(content)
    except Exception as error:  # tokenizers raises bare Exception for malformed content
        raise DataError(f"{name} is not a tokenizer.json: {error}") from error
    vocabulary: dict[str, int] = encoder.backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"tokenizer {name} has no tokens")
    end = _end_token(vocabulary, name, end_token)
    return TextTokenizer(
        encoder=encoder,
        fingerprint=fingerprint,
        vocab_size=max(vocabulary.values()) + 1,
        end_token=end,
        eod=None if end is None else vocabulary[end],
    )


def _end_token(vocabulary: dict[str, Any], name: str, wanted: str | None) -> str | None:
    if wanted is None:
        return next((token for token in KNOWN_ENDS if token in vocabulary), None)
    if wanted not in vocabulary:
        raise DataError(f"tokenizer {name} has no token {wanted!r} to end a document with")
    return wanted
