"""Encode full documents. No torch, no transformers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from .pretokens import PretokenEncoder

if TYPE_CHECKING:
    import tokenizers


@attrs.define
class DocumentEncoder:
    """Token ids of documents, without special tokens; one that a text spells is plain text.

    Args:
        content: Of a tokenizer.json.

    Raises:
        Exception: The content is malformed; the tokenizers library has no class of its own.
    """

    content: str = attrs.field(repr=False)
    backend: tokenizers.Tokenizer = attrs.field(init=False, repr=False)
    _encoder: PretokenEncoder[bytes] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        from tokenizers import Tokenizer

        self.backend = Tokenizer.from_str(self.content)
        self.backend.encode_special_tokens = True
        self.backend.no_padding()
        self.backend.no_truncation()
        self._encoder = PretokenEncoder(
            self.backend,
            json.loads(self.content),
            special_as_text=True,
            encode=_ids,
            encode_added=lambda token: array("i", [token["id"]]).tobytes(),
        )

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text."""
        return [np.frombuffer(b"".join(ids), np.int32) for _, ids in self._encoder.encode(texts)]


def _ids(backend: Any, texts: Sequence[str]) -> list[bytes]:
    """Return the ids of each text as the bytes of C integers."""
    encodings = backend.encode_batch_fast([*texts], add_special_tokens=False)
    return [array("i", encoding.ids).tobytes() for encoding in encodings]
