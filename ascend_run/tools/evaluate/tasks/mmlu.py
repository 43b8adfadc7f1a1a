"""MMLU: ``test/SUBJECT_test.csv`` and ``dev/SUBJECT_dev.csv`` without headers, with the columns
question, A, B, C, D, answer.

Source: Hendrycks et al. 2021, arXiv:2009.03300; format and header: github.com/hendrycks/test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ascend_run.text.sources import Problems
from ascend_run.tools.evaluate.prompts import Question, Subject, Wording

from .files import csv_rows, exam_question, exam_subjects
from .task import Task

ENGLISH: Final = Wording(
    header="The following are multiple choice questions (with answers) about {subject}.\n\n",
    instruction="There is a single choice question about {subject}. Answer the question by "
    "replying A, B, C or D.\nQuestion: ",
)


def _rows(file: Path, problems: Problems) -> Iterator[Question]:
    for row, values in csv_rows(file):
        if len(values) != 6:
            problems.add(f"has {len(values)} columns; expected question, A, B, C, D, answer", row)
        elif question := exam_question(values, row, problems):
            yield question


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the subjects."""
    return exam_subjects(path, problems, _rows, splits=("test",), suffix=".csv")


TASK: Final = Task(name="mmlu", load=load, wording=ENGLISH)
