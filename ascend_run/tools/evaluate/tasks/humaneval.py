"""HumanEval: JSON lines with task_id, prompt, entry_point and test, in ``HumanEval.jsonl``, which
may be compressed (``.gz``).

The answer completes the function whose head and description the prompt has; it counts if ``check``
of the test passes. A completion ends at the public evaluation's stop words.

Source: Chen et al. 2021, arXiv:2107.03374; format: github.com/openai/human-eval.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ascend_run.text.sources import Problems
from ascend_run.tools.evaluate.prompts import Form, ProgramTests, Question, Subject, Wording

from .files import json_rows, questions_of, text_field
from .task import Task

_NAMES: Final = ("HumanEval.jsonl", "HumanEval.jsonl.gz")
_BLOCK: Final = re.compile(r"```[^\n`]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def _rows(file: Path, problems: Problems) -> Iterator[Question]:
    for row, record in json_rows(file, problems):
        keys = ("prompt", "entry_point", "test")
        prompt, name, test = (text_field(record, key, row, problems) for key in keys)
        if not prompt or not name or not test:
            continue
        if not _definition(prompt, name):
            problems.add(f"expected 'def {name}' under key 'prompt', as entry_point says", row)
        elif not _definition(test, "check"):
            problems.add("expected 'def check' under key 'test'", row)
        else:
            tests = ProgramTests(function=name, code=f"{test}\ncheck({name})")
            yield Question(number=row, text=prompt, expected="passed", tests=tests)


def _definition(code: str, name: str) -> re.Match[str] | None:
    return re.search(rf"(?m)^(?:async )?def {re.escape(name)}\b", code)


def _program(text: str, question: Question, form: Form) -> str:
    assert question.tests is not None
    completed = question.text + text
    if form is Form.CHAT:
        completed = _answered(text, question.text, question.tests.function)
    return f"{completed}\n{question.tests.code}\n"


def _answered(text: str, prompt: str, name: str) -> str:
    """Return the program in the answer of a chat: its block with the function, or the first block,
    or all of it; whole, or what completes the prompt."""
    blocks = _BLOCK.findall(text) or [text]
    code: str = next((block for block in blocks if _definition(block, name)), blocks[0])
    begin = _definition(prompt, name)
    if begin and _definition(code, name):
        return prompt[: begin.start()] + code  # with its imports and other functions
    return f"{prompt}    {code.lstrip()}"


def load(path: Path, problems: list[str]) -> list[Subject]:
    """Read the problems."""
    file = next((path / name for name in _NAMES if (path / name).is_file()), path)
    if file.is_dir():
        problems.append(f"{path}: no {' or '.join(_NAMES)}")
        return []
    return [Subject(name="humaneval", questions=questions_of(file, _rows, problems))]


TASK: Final = Task(
    name="humaneval",
    load=load,
    program=_program,
    wording=Wording(
        chat_header="The definition and function description of the python function are as "
        "follows. Please complete the implementation of the python function.\n",
        instruction="Complete the following python code:\n",
        answer="",
        gap="",
    ),
    num_examples=0,
    max_new_tokens=512,
    stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
)
