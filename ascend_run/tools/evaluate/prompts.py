"""Questions and the prompts that ask them. Imports no torch.

The three forms are those of MindSpeed-LLM's evaluation (mindspeed_llm/tasks/evaluation): examples
and question as one text, as turns of a chat, and with an instruction before each question.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import attrs


class Form(StrEnum):
    """How a question is asked."""

    DIRECT = "direct"  #: A text to continue: a header, examples, the question.
    CHAT = "chat"  #: Examples as turns, by the model's chat template.
    ALTERNATIVE = "alternative"  #: A text with an instruction before each question.


@attrs.frozen(kw_only=True)
class ProgramTests:
    """Of a program that a question asks for."""

    function: str  #: Its name.
    code: str  #: What follows the program: its last line is reached if the program is right.


@attrs.frozen(kw_only=True)
class Question:
    """One row of a benchmark."""

    number: int  #: Line or row in its file, from 1.
    text: str
    expected: str
    labels: tuple[str, ...] = ()
    """What can be answered, such as letters; empty: any text."""
    choices: tuple[str, ...] = ()
    """The text of each label; empty: the question has it."""
    several: bool = False
    """Whether several labels can be right together; ``expected`` then has them with commas."""
    worked: str | None = None
    """The answer as an example shows it; None: ``expected``."""
    tests: ProgramTests | None = None
    """None: the answer is no program."""


@attrs.frozen(kw_only=True)
class Subject:
    """Questions of one file, and examples of answers."""

    name: str
    questions: tuple[Question, ...]
    examples: tuple[Question, ...] = ()
    header: str | None = None
    """Instead of the wording's."""


@attrs.frozen(kw_only=True)
class Prompt:
    """A text to continue, or turns of a chat."""

    text: str = ""
    turns: tuple[str, ...] = ()
    """Of the user and the assistant in turn; the last is the user's. Empty: ``text`` counts."""

    @property
    def shown(self) -> str:
        """The prompt for a reader."""
        return self.text or "\n\n".join(self.turns)


@attrs.frozen(kw_only=True)
class Wording:
    """The words around a question."""

    header: str = ""
    """Before all, with ``{subject}``."""
    chat_header: str | None = None
    """Of the chat form; None: ``header``."""
    instruction: str = ""
    """Before each question in the alternative form, with ``{subject}``."""
    question: str = "{text}"
    choice: str = "\n{label}. {choice}"
    answer: str = "\nAnswer:"
    gap: str = " "
    """Between ``answer`` and an answer."""

    def prompt(self, form: Form, subject: Subject, question: Question, num_examples: int) -> Prompt:
        """Return the prompt that asks a question after the first examples."""
        name = subject.name.replace("_", " ")
        header = self.header if subject.header is None else subject.header
        if form is Form.CHAT and self.chat_header is not None:
            header = self.chat_header
        header = header.replace("{subject}", name)
        examples = subject.examples[:num_examples]
        if form is Form.CHAT:
            turns = [turn for one in examples for turn in (self.asked(one), _answer(one))]
            turns.append(self.asked(question))
            return Prompt(turns=(header + turns[0], *turns[1:]))
        before = ""
        if form is Form.ALTERNATIVE:
            header, before = "", self.instruction.replace("{subject}", name)
        parts = [f"{before}{self.asked(one)}{self.gap}{_answer(one)}" for one in examples]
        return Prompt(text=header + "\n\n".join([*parts, before + self.asked(question)]))

    def asked(self, question: Question) -> str:
        """Return a question with its choices, up to where the answer begins."""
        choices: Sequence[str] = [
            self.choice.replace("{label}", label).replace("{choice}", choice)
            for label, choice in zip(question.labels, question.choices, strict=False)
        ]
        asked = self.question.replace("{text}", question.text)
        return "".join([asked, *choices, self.answer])


def _answer(example: Question) -> str:
    return example.expected if example.worked is None else example.worked
