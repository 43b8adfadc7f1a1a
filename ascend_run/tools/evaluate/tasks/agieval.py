"""AGIEval 1.1: ``SUBJECT.jsonl`` with passage, question, options ("(A)..."), label, answer.

A question without options has the text of its answer. In a file with several labels for a question,
an answer is right if it names all of them and no other, as in the public evaluation
(``convert_to_set`` of src/evaluation.py). Examples are those of ``dev/SUBJECT.jsonl`` beside the
folder of the questions, if it is there.

Source: Zhong et al. 2023, arXiv:2304.06364; format: github.com/ruixiangcui/AGIEval, data/v1_1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.text.sources import Problems
from ascend_run.tools.evaluate.prompts import Question, Subject, Wording
from ascend_run.tools.evaluate.readings import (
    Reading,
    read_label,
    read_labels,
    read_phrase,
    same_phrase,
)

from .files import exam_subjects, json_rows, text_field
from .task import Task

_OPTION: Final = re.compile(r"\s*\(?([A-Z])[).:\uff1a、]?\s*(.*)", re.DOTALL)


def _rows(file: Path, problems: Problems) -> Iterator[Question]:
    """Yield the questions; several labels of one make all of them such questions, so that how an
    answer is read does not tell what is right."""
    questions = [*_each(file, problems)]
    several = any(one.several for one in questions)
    return (attrs.evolve(one, several=several and bool(one.labels)) for one in questions)


def _each(file: Path, problems: Problems) -> Iterator[Question]:
    for row, record in json_rows(file, problems):
        asked = text_field(record, "question", row, problems)
        if asked is None:
            continue
        if passage := record.get("passage"):
            asked = f"{passage}\n{asked}"
        question = _choice if record.get("options") else _cloze
        if found := question(asked, record, row, problems):
            yield found


def _choice(asked: str, record: Mapping[str, Any], row: int, problems: Problems) -> Question | None:
    options, label = record["options"], record.get("label")
    matches = [_OPTION.fullmatch(str(one)) for one in options] if isinstance(options, list) else []
    labels = tuple(match[1] for match in matches if match)
    if not labels or len(labels) != len(options):
        problems.add("expected options that begin with their letters, as in (A)", row)
        return None
    right = label if isinstance(label, list) else [label]
    if not right or any(one not in labels for one in right):
        problems.add(f"expected labels of {', '.join(labels)}, got {label!r}", row)
        return None
    return Question(
        number=row,
        text=asked,
        expected=", ".join(one for one in labels if one in right),
        labels=labels,
        choices=tuple(match[2] for match in matches if match),
        several=len({*right}) > 1,
    )


def _cloze(asked: str, record: Mapping[str, Any], row: int, problems: Problems) -> Question | None:
    answer = text_field(record, "answer", row, problems)
    return None if answer is None else Question(number=row, text=asked, expected=answer)


def _read(text: str, question: Question) -> Reading:
    if question.several:
        return read_labels(text, question.labels)
    return read_label(text, question.labels) if question.labels else read_phrase(text)


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the subjects."""
    return exam_subjects(path, problems, _rows, splits=("test", "v1_1"), suffix=".jsonl")


TASK: Final = Task(
    name="agieval",
    load=load,
    read=_read,
    same=same_phrase,
    wording=Wording(
        choice="\n({label}) {choice}",
        instruction="Answer the question about {subject}.\nQuestion: ",
    ),
    max_new_tokens=32,
)
