"""Pairs from real code, by rule: the real ending is chosen, its words in another order rejected.

A passage is the beginning of a function of Python's standard library. The prompt is its first
``PROMPT`` characters, the chosen answer its next ``ENDING`` ones, and the rejected answer the same
words in a random order, between the same spaces and line ends. So the two have the same words and
the same length, and a model that has learnt only how frequent each word is cannot tell which one
stood there. Held-out passages are of files of which training reads nothing.

python examples/dpo_data.py FOLDER [LIBRARY]
"""

from __future__ import annotations

import json
import random
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import attrs

PROMPT, ENDING = 100, 100
"""Lengths in characters."""
WORDS = 6
"""Different words of an ending at least."""
PER_FILE = 20
"""Passages of a file at most, so that no file dominates."""
HELDOUT = 256
"""Held-out pairs."""
LEFT_OUT = {"test", "tests", "idle_test", "site-packages"}
FUNCTION = re.compile(r"^(?= *def )", re.MULTILINE)
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@attrs.frozen(kw_only=True)
class Passage:
    """The beginning of a function."""

    file: str
    """Relative to the library."""
    text: str

    @property
    def prompt(self) -> str:
        return self.text[:PROMPT]

    @property
    def ending(self) -> str:
        return self.text[PROMPT:]

    @property
    def usable(self) -> bool:
        """Whether it is complete, and its words have an order."""
        return len(self.text) == PROMPT + ENDING and len(set(self.ending.split())) >= WORDS


def passages(library: Path) -> list[list[Passage]]:
    """Return the passages of each file; none occurs twice."""
    found, texts = [], set()
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not LEFT_OUT.isdisjoint(name.parts):
            continue
        file: list[Passage] = []
        for function in FUNCTION.split(path.read_text(encoding="utf-8"))[1:]:
            passage = Passage(file=name.as_posix(), text=function[: PROMPT + ENDING])
            if passage.usable and passage.text not in texts and len(file) < PER_FILE:
                texts.add(passage.text)
                file.append(passage)
        found.append(file)
    return found


def split(files: Sequence[Sequence[Passage]]) -> tuple[list[Passage], list[Passage]]:
    """Return the passages of training in random order, and ``HELDOUT`` ones of other files."""
    chance, mixed = random.Random(0), list(files)
    chance.shuffle(mixed)
    heldout: list[Passage] = []
    while len(heldout) < HELDOUT:
        heldout += mixed.pop()
    train = [passage for file in mixed for passage in file]
    chance.shuffle(train)
    return train, heldout[:HELDOUT]


def reordered(ending: str, chance: random.Random) -> str:
    """Return the words in another order, between the same white space."""
    parts = re.split(r"(\S+)", ending)
    words = parts[1::2]
    while "".join(parts) == ending:
        chance.shuffle(words)
        parts[1::2] = words
    return "".join(parts)


def pairs(passages: Sequence[Passage]) -> list[dict[str, object]]:
    """Return a record of ``sharegpt-pairwise`` for each passage."""
    chance = random.Random(0)
    return [
        {
            "conversations": [{"from": "human", "value": passage.prompt}],
            "chosen": {"from": "gpt", "value": passage.ending},
            "rejected": {"from": "gpt", "value": reordered(passage.ending, chance)},
        }
        for passage in passages
    ]


def main(folder: Path, library: Path) -> None:
    """Write ``corpus.jsonl``, ``train.jsonl``, ``heldout.jsonl`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = split(passages(library))
    for name, records in (
        ("corpus", [{"text": passage.text} for passage in train]),
        ("train", pairs(train)),
        ("heldout", pairs(heldout)),
    ):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    target, *given = map(Path, sys.argv[1:])
    main(target, given[0] if given else Path(sysconfig.get_paths()["stdlib"]))
