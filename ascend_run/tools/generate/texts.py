"""Texts to token ids and back, as the model's tokenizer says. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api.errors import ConfigError, DataError
from ascend_run.text.generated_text import GeneratedText
from ascend_run.text.tokenizer import TextTokenizer, load_tokenizer
from ascend_run.text.tokenizer_content import NAMES

_END_FILES: Final = ("generation_config.json", "config.json")
"""Files of a Hugging Face folder that name the end of a text; the first that does counts."""


@attrs.frozen(kw_only=True, eq=False)
class Texts:
    """Encodes prompts; knows the tokens that end a text."""

    tokenizer: TextTokenizer
    end_ids: frozenset[int]  #: Ids that end a text.
    path: Path  #: The tokenizer's file or folder.

    def ids(self, prompt: str) -> tuple[int, ...]:
        """Return the ids of a prompt, with the special tokens that it spells and those that the
        tokenizer adds, such as the begin of a text."""
        return tuple(self.tokenizer.backend.encode(prompt, add_special_tokens=True).ids)

    def continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return the text of the new ids, without special tokens."""
        text = GeneratedText(self.tokenizer.backend, prompt)
        return "".join([*(text.push(token) for token in new), text.finish()])

    def special_ids(self, words: Sequence[str]) -> frozenset[int]:
        """Return the ids of those words that are special tokens."""
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return frozenset(
            number for number, token in added.items() if token.special and token.content in words
        )

    def token(self, number: int) -> str:
        """Return the text of a token alone."""
        return self.tokenizer.decode([number])


def open_texts(named: Path | None, folders: Sequence[Path], config: Path | None) -> Texts:
    """Open the tokenizer of a model.

    Args:
        named: The user's, a file or a folder.
        folders: Where the files of the model are; looked through for a tokenizer.
        config: Of a run: its config, whose ``data.tokenizer`` comes after the folders.

    Raises:
        ConfigError: There is none; names where it was looked for.
        DataError: It cannot be read.
    """
    candidates = [named] if named is not None else [*_candidates(folders, config)]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        places = [f"no {path}" for path in candidates]
        raise ConfigError("no tokenizer found; name one with --tokenizer", places)
    tokenizer = load_tokenizer(found)
    # The prompt may spell special tokens, unlike a document to train on.
    tokenizer.backend.encode_special_tokens = False
    stated = next(filter(None, (_end_ids(folder) for folder in folders)), frozenset())
    known = frozenset() if tokenizer.eod is None else frozenset({tokenizer.eod})
    return Texts(tokenizer=tokenizer, end_ids=stated or known, path=found)


def _candidates(folders: Sequence[Path], config: Path | None) -> Iterator[Path]:
    for folder in folders:
        yield from (folder / name for name in NAMES)
    if config is None:
        return
    from ascend_run.prepare.config.reading import read_raw

    if (given := read_raw(config).values.get("data.tokenizer")) is None:
        return
    stated = Path(str(given.value))
    yield stated
    yield config.parent / stated.name


def _end_ids(folder: Path) -> frozenset[int]:
    """
    Raises:
        DataError: A file is no JSON object.
    """
    from ascend_run.core.hugging_face.json_files import read_object

    for name in _END_FILES:
        if not (folder / name).is_file():
            continue
        stated: Any = read_object(folder / name, DataError).get("eos_token_id")
        ids = stated if isinstance(stated, list) else [stated]
        if found := frozenset(number for number in ids if isinstance(number, int)):
            return found
    return frozenset()
