"""Find a tokenizer's file, and read it as ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

JSON_NAME: Final = "tokenizer.json"
MODEL_NAME: Final = "tokenizer.model"
NAMES: Final = (JSON_NAME, MODEL_NAME, "tiktoken.model", "qwen.tiktoken")
"""Files of a tokenizer, in the order in which they are looked for in a folder; transformers too
prefers tokenizer.json."""
_MODEL_SUFFIXES: Final = (".model", ".tiktoken")


def tokenizer_content(path: Path) -> tuple[str, Path]:
    """Return the content of a ``tokenizer.json``, and the file that it is read from.

    Args:
        path: A ``tokenizer.json``, a SentencePiece model or a tiktoken file (which end in
            ``.model`` or ``.tiktoken``, and are distinguished by their content), or a folder with
            some of them; the first of ``NAMES`` is read.

    Raises:
        FileNotFoundError: There is none.
        ValueError: A model cannot be converted; see the two ``as_tokenizer_json``.
        OSError, UnicodeDecodeError: The file cannot be read.
    """
    file = path
    if path.is_dir():
        found = (path / name for name in NAMES if (path / name).is_file())
        file = next(found, path / JSON_NAME)
    if file.suffix in _MODEL_SUFFIXES and file.is_file():
        from . import sentencepiece_model, tiktoken_model

        added = _added_tokens(file.parent)
        if not tiktoken_model.is_tiktoken(file):
            return sentencepiece_model.as_tokenizer_json(file, added), file
        config = {
            key: value
            for name in ("config.json", "tokenizer_config.json")
            for key, value in _read(file.parent / name).items()
        }
        return tiktoken_model.as_tokenizer_json(file, config, added), file
    return file.read_text(encoding="utf-8"), file


def _added_tokens(folder: Path) -> Mapping[int, str]:
    """Id -> special token that ``tokenizer_config.json`` adds to a model."""
    path = folder / "tokenizer_config.json"
    tokens: Any = _read(path).get("added_tokens_decoder", {})
    try:
        return {int(number): str(token["content"]) for number, token in tokens.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _read(path: Path) -> Mapping[str, Any]:
    """Return a JSON object; an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: expected a JSON object")
    return content
