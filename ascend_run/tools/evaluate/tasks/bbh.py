"""BIG-Bench Hard: ``bbh/SUBJECT.json`` with examples of input and target.

``cot-prompts/SUBJECT.txt`` has a description and examples with their reasoning, after a line of
dashes.

Source: Suzgun et al. 2022, arXiv:2210.09261; format: github.com/suzgunmirac/BIG-Bench-Hard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.text.sources import Problems
from ascend_run.tools.evaluate.prompts import Question, Subject, Wording
from ascend_run.tools.evaluate.readings import Reading, read_label, read_phrase, same_phrase

from .files import questions_of, split_files, text_field
from .task import Task

_OPTION: Final = re.compile(r"^\(([A-Z])\)", re.MULTILINE)


def _rows(file: Path, problems: Problems) -> Iterator[Question]:
    try:
        content: Any = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        problems.add(f"is not JSON: {error}")
        return
    examples = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(examples, list):
        problems.add("has no list under key 'examples'")
        return
    for row, record in enumerate(examples, start=1):
        if not isinstance(record, dict):
            problems.add(f"expected an object, got {type(record).__name__}", row)
            continue
        asked, target = (text_field(record, key, row, problems) for key in ("input", "target"))
        if asked and target:
            labels = tuple(_OPTION.findall(asked))
            expected = target.strip("()") if labels else target
            yield Question(number=row, text=asked, expected=expected, labels=labels)


def _with_examples(subject: Subject, file: Path, problems: list[str]) -> Subject:
    """Return a subject with the examples of its prompt."""
    if not file.is_file():
        return subject
    try:
        _, _, prompt = file.read_text("utf-8").rpartition("-----\n")  # all of it without dashes
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")
        return subject
    header, *blocks = re.split(r"(?m)^Q: ", prompt)
    examples = []
    for number, block in enumerate(blocks, start=1):
        asked, answers, worked = block.partition("\nA:")
        if not answers:
            problems.append(f"{file}: its example {number} has no line that begins with 'A:'")
            continue
        example = Question(number=number, text=asked, expected="", worked=worked.strip())
        examples.append(example)
    return attrs.evolve(subject, header=header, examples=tuple(examples))


def _read(text: str, question: Question) -> Reading:
    return read_label(text, question.labels) if question.labels else read_phrase(text)


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the subjects."""
    files, dev = split_files(path, ("bbh", "data"), ".json")
    if not files:
        problems.append(f"{path}: no files ending in .json")
    prompts = dev.with_name("cot-prompts")
    return [
        _with_examples(
            Subject(name=file.stem, questions=questions_of(file, _rows, problems)),
            prompts / f"{file.stem}.txt",
            problems,
        )
        for file in files
    ]


TASK: Final = Task(
    name="bbh",
    load=load,
    read=_read,
    same=same_phrase,
    wording=Wording(
        question="Q: {text}", answer="\nA:", instruction="Answer the question about {subject}.\n"
    ),
    num_examples=3,
    reasons=True,
    max_new_tokens=256,
    stop=("\nQ:",),
)
