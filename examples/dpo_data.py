"""Pairs from real code: which of two endings stood there.

A passage is the beginning of a function of Python's standard library. The prompt is its first
``PROMPT`` characters, the chosen answer its next ``ENDING`` ones, and the rejected answer the
ending of a passage of another file. Every ending is chosen as often as rejected, so what is learnt
of endings alone cannot tell which one stood there. Training has ``REJECTED`` pairs of each passage,
with different rejected answers. Held-out passages are of files of which training reads nothing.

python examples/dpo_data.py FOLDER [LIBRARY]
"""

from __future__ import annotations

import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

PROMPT, ENDING = 100, 100
"""Lengths in characters."""
WORDS = 6
"""Different words of an ending at least."""
PER_FILE = 20
"""Passages of a file at most, so that no file dominates."""
REJECTED = 6
"""Pairs of each passage of training."""
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
        """Whether it is complete, and its ending has words enough to differ from others."""
        return len(self.text) == PROMPT + ENDING and len(set(self.ending.split())) >= WORDS


def passages(library: Path) -> list[list[Passage]]:
    """Return the passages of each file; no ending occurs twice."""
    found, endings = [], set()
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not LEFT_OUT.isdisjoint(name.parts):
            continue
        file: list[Passage] = []
        for function in FUNCTION.split(path.read_text(encoding="utf-8"))[1:]:
            passage = Passage(file=name.as_posix(), text=function[: PROMPT + ENDING])
            if passage.usable and passage.ending not in endings and len(file) < PER_FILE:
                endings.add(passage.ending)
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


def pairs(passages: Sequence[Passage], times: int) -> Iterator[dict[str, object]]:
    """Yield records of ``sharegpt-pairwise``: each passage so many times, beside other endings."""
    by_file = sorted(passages, key=lambda passage: passage.file)
    for turn in range(1, times + 1):
        far = len(by_file) * turn // (times + 1)  # farther than the passages of a file
        for passage, other in zip(by_file, by_file[far:] + by_file[:far], strict=True):
            yield {
                "conversations": [{"from": "human", "value": passage.prompt}],
                "chosen": {"from": "gpt", "value": passage.ending},
                "rejected": {"from": "gpt", "value": other.ending},
            }


def main(folder: Path, library: Path) -> None:
    """Write ``corpus.jsonl``, ``train.jsonl``, ``heldout.jsonl`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = split(passages(library))
    for name, records in (
        ("corpus", [{"text": passage.text} for passage in train]),
        ("train", pairs(train, REJECTED)),
        ("heldout", pairs(heldout, 1)),
    ):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    target, *given = map(Path, sys.argv[1:])
    main(target, given[0] if given else Path(sysconfig.get_paths()["stdlib"]))
