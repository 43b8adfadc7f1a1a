"""C-Eval: ``val/SUBJECT_val.csv`` and ``dev/SUBJECT_dev.csv`` with the columns id, question, A, B,
C, D, answer, and in dev explanation; the answers of its test split are not public.

Source: Huang et al. 2023, arXiv:2305.08322; format: github.com/hkust-nlp/ceval.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ascend_run.tools.evaluate.prompts import Subject, Wording

from .files import exam_subjects, headed_exam_rows
from .task import Task

CHINESE: Final = Wording(
    header="以下是中国关于{subject}考试的单项选择题\uff0c请选出其中的正确答案。\n\n",
    instruction="以下是一道关于{subject}的单项选择题\uff0c请回答 A、B、C 或 D。\n问题\uff1a",
    answer="\n答案\uff1a",
    gap="",
)


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the subjects."""
    return exam_subjects(path, problems, headed_exam_rows, splits=("val",), suffix=".csv")


TASK: Final = Task(name="ceval", load=load, wording=CHINESE)
