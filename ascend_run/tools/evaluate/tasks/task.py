"""What a benchmark is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from ascend_run.tools.evaluate.prompts import Form, Question, Subject, Wording
from ascend_run.tools.evaluate.readings import Reading, read_label


def same_text(answer: str, expected: str) -> bool:
    """Whether two labels are equal."""
    return answer == expected


def read_letter(text: str, question: Question) -> Reading:
    """Find one of the question's labels."""
    return read_label(text, question.labels)


@attrs.frozen(kw_only=True)
class Task:
    """A benchmark."""

    name: str
    load: Callable[[Path, list[str]], list[Subject]]
    """Called with the user's path and a list for problems, one sentence each."""
    wording: Wording
    read: Callable[[str, Question], Reading] = read_letter
    """Find the answer in a generated text."""
    same: Callable[[str, str], bool] = same_text
    """Whether what was found is what was expected."""
    program: Callable[[str, Question, Form], str] | None = None
    """Build the program with its tests that a generated text makes; None: answers are none."""
    reasons: bool = False
    """Whether an answer comes after its reasons, so that it is always read in a generated text."""
    num_examples: int = 5
    """Of each question, by default, if the files have so many."""
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ("\n\n",)
    """Of the forms that are texts to continue."""
