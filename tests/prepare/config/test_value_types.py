from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import pytest

from ascend_run.plugin_api.error_text import show
from ascend_run.prepare.config.value_types import (
    TypeMismatch,
    describe,
    is_list,
    may_be_text,
    parse_size,
    structure,
)


class Mode(enum.StrEnum):
    SYNC = "sync"


@attrs.frozen
class Nested:
    size: int


@pytest.mark.parametrize(
    ("value", "expected", "result"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (3, float | None, 3.0),
        (None, int | None, None),
        ("none", int | None, None),
        ("none", Literal["none", "full"] | None, "none"),
        (True, bool, True),
        ([1, 2], tuple[int, int], (1, 2)),
        ([1, 2], list[int], [1, 2]),
        ([1], int | list[int], [1]),
        (["a"], tuple[str, ...], ("a",)),
        (["a", "a"], frozenset[str], frozenset({"a"})),
        (["a"], Sequence[str], ("a",)),
        (["a", 1], tuple, ("a", 1)),
        ([["a"], []], tuple[tuple[str, ...], ...], (("a",), ())),
        ([], tuple[()], ()),
        ("bf16", Literal["bf16"], "bf16"),
        ("sync", Mode, Mode.SYNC),
        ({"a": 1}, dict[str, int], {"a": 1}),
        ({"size": 3}, Nested, Nested(3)),
    ],
)
def test_a_value_of_the_type_is_taken(value: Any, expected: Any, result: Any) -> None:
    taken = structure(value, expected)
    assert taken == result
    assert type(taken) is type(result)


@pytest.mark.parametrize(
    ("value", "expected", "words"),
    [
        ("3", int, "a whole number"),
        (3.0, int, "a whole number"),
        (True, int, "a whole number"),
        (2**63, int, "a whole number"),
        (1, bool, "true or false"),
        ("true", bool, "true or false"),
        (3, str, "a string"),
        ("a\0b", str, "a string"),
        ("a\udcff", str, "a string"),
        (True, float, "a number"),
        (float("nan"), float, "a number that is finite"),
        (10**400, float, "a number"),
        (None, int, "a whole number"),
        ("none", int, "a whole number"),
        ("abc", list[str], "a list of strings; write ['abc']"),
        ("abc", frozenset[str], "a list of strings; write ['abc']"),
        ("abc", Sequence[str], "a list of strings; write ['abc']"),
        ("abc", tuple, "a list of values; write ['abc']"),
        ("abc", tuple[str, ...] | None, "a list of strings or \"none\"; write ['abc']"),
        (3, tuple[int, ...], "a list of whole numbers; write [3]"),
        (True, tuple[int, ...], "a list of whole numbers"),
        ([1.0], tuple[int, ...], "a list of whole numbers"),
        ([None], tuple[int, ...], "a list of whole numbers"),
        ("ab", tuple[str, str], "a list of 2 (a string, a string)"),
        (["ab"], tuple[tuple[str, ...], ...], "a list of values, each a list of strings"),
        ({"a": "bc"}, Mapping[str, Sequence[str]], "a table of values, each a list of strings"),
        ([6, "x"], tuple[float | Literal["all"], ...], "a list of values, each a number or 'all'"),
        (["c"], list[Literal["a", "b"]], "a list of values, each one of 'a', 'b'"),
        (["a", 1], tuple[str, ...], "a list of strings"),
        ([1], tuple[int, int], "a list of 2 (a whole number, a whole number)"),
        ("x", int | list[int] | None, 'a whole number or a list of whole numbers or "none"'),
        ("x", Literal["a", "b"], "one of 'a', 'b'"),
        ("x", Mode, "'sync'"),
        ([1], dict[str, int], "a table of whole numbers"),
        ({"size": "3"}, Nested, "a Nested"),
        ({"size": 3, "x": 1}, Nested, "a Nested"),
    ],
)
def test_a_value_of_another_type_is_refused_in_words(value: Any, expected: Any, words: str) -> None:
    with pytest.raises(TypeMismatch) as refused:
        structure(value, expected)
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("text", "size"),
    [("1MiB", 2**20), ("64 KB", 64000), ("2GiB", 2**31), ("7B", 7), ("1TB", 10**12)],
)
def test_a_count_of_bytes_may_be_a_size(text: str, size: int) -> None:
    assert structure(text, int, "min_bytes") == parse_size(text) == size


@pytest.mark.parametrize("text", ["1 parsec", "MiB", "1.5MiB", "-1MiB", "1miB"])
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(TypeMismatch, match='a size such as "1MiB"'):
        structure(text, int, "min_bytes")


def test_a_size_is_for_bytes_only() -> None:
    with pytest.raises(TypeMismatch):
        structure("1MiB", int, "count")


def test_what_text_may_stand_for() -> None:
    assert may_be_text(str | None)
    assert may_be_text(Literal["a"])
    assert not may_be_text(int | list[int])
    assert is_list(tuple[str, ...])
    assert not is_list(str | list[str])
    assert not is_list(int)


def test_a_value_is_shown_as_toml_and_short() -> None:
    assert [show(v) for v in (None, True, 3, "a", 2**70)] == [
        "none",
        "true",
        "3",
        "'a'",
        "a very large number",
    ]
    assert len(show("x" * 1000)) < 50
    assert describe(list[Any]) == "a list of values"
