"""CMMLU: ``test/SUBJECT.csv`` and ``dev/SUBJECT.csv`` with the columns Question, A, B, C, D and
Answer, after one of numbers.

Source: Li et al. 2023, arXiv:2306.09212; format: github.com/haonan-li/CMMLU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ascend_run.tools.evaluate.prompts import Subject

from .ceval import CHINESE
from .files import exam_subjects, headed_exam_rows
from .task import Task


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the subjects."""
    return exam_subjects(path, problems, headed_exam_rows, splits=("test",), suffix=".csv")


TASK: Final = Task(name="cmmlu", load=load, wording=CHINESE)
