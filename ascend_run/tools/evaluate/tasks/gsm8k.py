"""GSM8K: JSON lines with question and answer, in ``test.jsonl`` and ``train.jsonl``.

The number is after ``####``, and ``<<...>>`` are notes of a calculator.

Source: Cobbe et al. 2021, arXiv:2110.14168; format: github.com/openai/grade-school-math.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from ascend_run.text.sources import Problems
from ascend_run.tools.evaluate.prompts import Question, Subject, Wording
from ascend_run.tools.evaluate.readings import Reading, read_number, same_number

from .files import json_rows, questions_of, text_field
from .task import Task

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_MOST_EXAMPLES: Final = 64


def _rows(file: Path, problems: Problems) -> Iterator[Question]:
    for row, record in json_rows(file, problems):
        asked, answer = (text_field(record, key, row, problems) for key in ("question", "answer"))
        if not asked or not answer:
            continue
        solution, mark, number = answer.rpartition("####")
        number = number.strip().replace(",", "").replace("$", "")
        if not mark or not _NUMBER.fullmatch(number):
            problems.add("expected an answer that ends in '#### ' and a number", row)
            continue
        steps = re.sub(r"<<.*?>>", "", solution).strip()
        worked = f"{steps}\nThe answer is {number}."
        yield Question(number=row, text=asked, expected=number, worked=worked)


def _first_rows(file: Path, problems: Problems) -> Iterator[Question]:
    return islice(_rows(file, problems), _MOST_EXAMPLES)


def _read(text: str, question: Question) -> Reading:
    return read_number(text)


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the questions of the test."""
    file = path / "test.jsonl" if path.is_dir() else path
    if not file.is_file():
        problems.append(f"{path}: no test.jsonl")
        return []
    train = file.parent / "train.jsonl"
    examples = questions_of(train, _first_rows, problems) if train.is_file() else ()
    return [Subject(name="gsm8k", questions=questions_of(file, _rows, problems), examples=examples)]


TASK: Final = Task(
    name="gsm8k",
    load=load,
    read=_read,
    same=same_number,
    wording=Wording(
        question="Q: {text}",
        answer="\nA:",
        instruction="Solve the problem, and end with 'The answer is' and the number.\n",
    ),
    reasons=True,
    max_new_tokens=256,
    stop=("Q:",),
)
