"""Find a tokenizer's file, and read it as ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

JSON_NAME: Final = "tokenizer.json"
MODEL_NAME: Final = "tokenizer.model"
NAMES: Final = (JSON_NAME, MODEL_NAME)
"""Files of a tokenizer, in the order in which they are looked for in a folder."""


def tokenizer_content(path: Path) -> tuple[str, Path]:
    """Return the content of a ``tokenizer.json``, and the file that it is read from.

    Args:
        path: A ``tokenizer.json``, a SentencePiece model (a file that ends in ``.model``), or a
            folder with one of them; of both, the ``tokenizer.json`` is read.

    Raises:
        FileNotFoundError: There is none.
        ValueError: A SentencePiece model cannot be converted; see ``as_tokenizer_json``.
        OSError, UnicodeDecodeError: The file cannot be read.
    """
    file = path
    if path.is_dir():
        found = (path / name for name in NAMES if (path / name).is_file())
        file = next(found, path / JSON_NAME)
    if file.suffix == Path(MODEL_NAME).suffix and file.is_file():
        from .sentencepiece_model import as_tokenizer_json

        return as_tokenizer_json(file, _added_tokens(file.parent)), file
    return file.read_text(encoding="utf-8"), file


def _added_tokens(folder: Path) -> Mapping[int, str]:
    """Id -> special token that ``tokenizer_config.json`` adds to a SentencePiece model."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        tokens: Any = json.loads(path.read_text(encoding="utf-8"))["added_tokens_decoder"]
        return {int(number): str(token["content"]) for number, token in tokens.items()}
    except KeyError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
