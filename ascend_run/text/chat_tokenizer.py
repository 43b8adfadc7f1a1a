"""Load the tokenizer and the special tokens of a folder. No torch, no transformers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from .tokenizer_content import NAMES, tokenizer_content
from .tokens import TokenEncoder

_VARIABLES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@attrs.frozen(kw_only=True, eq=False)
class ChatTokenizer:
    """Tokenizer data that encoding a conversation needs."""

    backend: Any
    """A tokenizers.Tokenizer; special tokens in a text are encoded as tokens."""
    tokens: TokenEncoder
    """The same, for many texts."""
    variables: Mapping[str, str]
    """``bos_token`` and similar, named as in chat templates."""
    special_ids: frozenset[int]
    bos_id: int | None
    eos_id: int
    pad_id: int
    vocab_size: int
    """One more than the largest token id."""
    sha256: str
    spells_special: re.Pattern[str]
    """Matches the text of a special token."""


def tokenizer_folder(path: str | Path) -> Path:
    """Return the folder that ``data.tokenizer`` names, directly or by the tokenizer's file."""
    path = Path(path)
    return path.parent if path.name in NAMES else path


def read_tokenizer_config(folder: Path) -> Mapping[str, object]:
    """Read ``tokenizer_config.json``, with ``special_tokens_map.json`` as defaults.

    Returns an empty mapping if both are missing.

    Raises:
        ValueError: One of them is not a JSON object.
    """
    merged: dict[str, object] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            if not isinstance(content, dict):
                raise ValueError(f"{path}: expected a JSON object")
            merged |= content
    return merged


def load_chat_tokenizer(
    folder: Path,
    config: Mapping[str, Any],
    option: str = "data.tokenizer",
    file: Path | None = None,
) -> ChatTokenizer:
    """Read the tokenizer of a folder.

    Args:
        file: The one of its files to read; default: the first of ``NAMES``.

    Raises:
        ValueError: The tokenizer is missing, is invalid, or has no end-of-sequence token.
    """
    from tokenizers import Tokenizer

    content, path = _content(file or folder, folder, option)
    try:
        backend = Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises bare Exception for any malformed content
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    variables = {name: _text(config.get(name)) for name in _VARIABLES}
    vocabulary = backend.get_vocab(with_added_tokens=True)

    def id_of(name: str) -> int | None:
        return vocabulary.get(variables[name])

    eos_id = id_of("eos_token")
    if eos_id is None:
        raise ValueError(
            f"{folder}: tokenizer_config.json names no eos_token of the vocabulary (found "
            f"{variables['eos_token']!r}); every assistant turn must end with one"
        )
    added = backend.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    for name in ("bos_token", "eos_token"):
        if (number := id_of(name)) is not None:
            special[number] = variables[name]
    pad_id = id_of("pad_token")
    spelled = sorted(filter(None, special.values()), key=len, reverse=True)
    return ChatTokenizer(
        backend=backend,
        tokens=TokenEncoder(backend, json.loads(content)),
        variables={name: text for name, text in variables.items() if text}
        | {"bos_token": variables["bos_token"]},
        special_ids=frozenset(special),
        bos_id=id_of("bos_token"),
        eos_id=eos_id,
        pad_id=eos_id if pad_id is None else pad_id,
        vocab_size=max(vocabulary.values()) + 1,
        sha256=hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest(),
        spells_special=re.compile("|".join(map(re.escape, spelled))),
    )


def _content(path: Path, folder: Path, option: str) -> tuple[str, Path]:
    """Return the content of ``tokenizer.json`` and the file; raise ValueError if there is none."""
    try:
        return tokenizer_content(path)
    except FileNotFoundError:
        raise ValueError(
            f"{option}: {folder} has no {' and no '.join(NAMES)}; name the folder of a tokenizer "
            "that has one (transformers writes tokenizer.json with save_pretrained)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from None


def _text(token: object) -> str:
    """Return the text of a special token, which may be stored with its properties."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
