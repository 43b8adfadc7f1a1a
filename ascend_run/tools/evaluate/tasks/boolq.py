"""BoolQ: JSON lines with question, passage and answer, a boolean, in ``dev.jsonl`` and
``train.jsonl``; as SuperGLUE has it, label instead of answer, and ``val.jsonl``.

Source: Clark et al. 2019, arXiv:1905.10044; format:
github.com/google-research-datasets/boolean-questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from ascend_run.text.sources import Problems
from ascend_run.tools.evaluate.prompts import Question, Subject, Wording

from .files import json_rows, questions_of, text_field
from .task import Task

_LABELS: Final = ("no", "yes")
_MOST_EXAMPLES: Final = 64


def _rows(file: Path, problems: Problems) -> Iterator[Question]:
    for row, record in json_rows(file, problems):
        passage, asked = (text_field(record, key, row, problems) for key in ("passage", "question"))
        key = "label" if "answer" not in record and "label" in record else "answer"
        answer = record.get(key)
        if not isinstance(answer, bool):
            problems.add(f"expected true or false under key {key!r}, got {answer!r}", row)
        elif passage and asked:
            text = f"{passage}\nQuestion: {asked.removesuffix('?')}?"
            yield Question(number=row, text=text, expected=_LABELS[answer], labels=_LABELS)


def _first_rows(file: Path, problems: Problems) -> Iterator[Question]:
    return islice(_rows(file, problems), _MOST_EXAMPLES)


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the validation questions."""
    names = ("val.jsonl", "dev.jsonl")
    file = next((path / name for name in names if (path / name).is_file()), path)
    if file.is_dir():
        problems.append(f"{path}: no {' or '.join(names)}")
        return []
    train = file.parent / "train.jsonl"
    examples = questions_of(train, _first_rows, problems) if train.is_file() else ()
    return [Subject(name="boolq", questions=questions_of(file, _rows, problems), examples=examples)]


TASK: Final = Task(
    name="boolq",
    load=load,
    wording=Wording(instruction="Read the passage and answer yes or no.\n"),
)
