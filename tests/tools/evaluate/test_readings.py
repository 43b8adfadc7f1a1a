"""The answer in a generated text."""

import pytest

from ascend_run.tools.evaluate.readings import (
    read_label,
    read_labels,
    read_number,
    read_phrase,
    same_phrase,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("B", "B"),
        (" B\n\nExplanation: A is", "B"),
        ("(C) because", "C"),
        ("**D**", "D"),
        ("B. A. is wrong", "B"),
        ("A cat sat. The answer is B.", "B"),
        ("the answer is A. No, the correct answer is (C)", "C"),
        ("Answer: D", "D"),
        ("答案是C", "C"),
        ("答案\uff1a B", "B"),
        ("The correct option is \\boxed{A}", "A"),
        ("I choose (B), since it fits.", "B"),
        ("A is right", "A"),
        ("A cat", None),
        ("Because", None),
        ("(A) or (B)", None),
        ("E", None),
        ("", None),
        ("|", None),
    ],
)
def test_a_letter(text: str, answer: str | None) -> None:
    assert read_label(text, "ABCD").answer == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("ABD", "A, B, D"),
        (" (C) and (A)", "A, C"),
        ("A is right, and C is", "A, C"),
        ("答案是B、C。\n因为A不对", "B, C"),
        ("The answer is A, C.\nB is wrong", "A, C"),
        ("A cat and Because", None),
        ("E", None),
        ("", None),
    ],
)
def test_several_letters(text: str, answer: str | None) -> None:
    assert read_labels(text, "ABCD").answer == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" Yes.", "yes"), ("no", "no"), ("The answer is: No", "no"), ("not now", None), ("y", None)],
)
def test_a_word(text: str, answer: str | None) -> None:
    assert read_label(text, ("no", "yes")).answer == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42", "42"),
        ("The answer is -3.5. Then 7", "-3.5"),
        ("it is 5\n#### 1,000", "1000"),
        ("first 3, then 4.", "4"),
        ("9 Q: 10", "9"),
        ("$2 and $1,234.50", "1234.50"),
        ("The answer is unknown", None),
        ("", None),
    ],
)
def test_a_number(text: str, answer: str | None) -> None:
    assert read_number(text).answer == answer


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("So the answer is valid.", "valid", True),
        ("So the answer is in valid.", "invalid", True),
        ("answer is [ ]. But the answer is ) ]", ") ]", True),
        ("True\nQ: x\nA: False", "True", True),
        ("invalid", "valid", False),
    ],
)
def test_a_phrase(text: str, expected: str, same: bool) -> None:
    answer = read_phrase(text).answer
    assert answer is not None
    assert same_phrase(answer, expected) == same
    assert read_phrase(" \n").answer is None
