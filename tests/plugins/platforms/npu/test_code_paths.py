"""The coverage record of the arithmetic tests matches the current code and tests.

``python scripts/npu_coverage.py`` writes the record, in some minutes; these tests only check it.
"""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from scripts.npu_coverage import (
    EXEMPT,
    OUTPUT,
    PACKAGE,
    ROOT,
    TESTS,
    fingerprint,
    modules,
    outline,
    refusals,
)

RECORD: dict[str, Any] = json.loads(OUTPUT.read_text(encoding="utf-8"))
AGAIN = "run scripts/npu_coverage.py"


def test_it_is_of_every_module_as_it_is() -> None:
    now = {path.relative_to(PACKAGE).as_posix(): fingerprint(path) for path in modules()}
    assert {name: found["code"] for name, found in RECORD["modules"].items()} == now, AGAIN


def test_it_is_of_these_tests_as_they_are() -> None:
    assert RECORD["tests"] == {name: fingerprint(ROOT / name) for name in TESTS}, AGAIN


def test_every_path_is_covered_except_errors_and_exemptions() -> None:
    """Each exemption has a reason."""
    found = RECORD["modules"]
    assert {name: left["missing"] for name, left in found.items() if left["missing"]} == {}
    exempt = {key: why for module in found.values() for key, why in module["exempt"].items()}
    assert exempt == EXEMPT


SOURCE = """
def f(x):
    if x > 1:
        y = 2
        raise ValueError(
            y
        )
    try:
        x = 1 / x
    except ZeroDivisionError as error:
        raise ValueError from error
    if x:
        return 1
    return 2


def always():
    x = 1
    raise ValueError(x)
"""


def test_a_refusal_is_what_leads_to_an_exception_and_nothing_else() -> None:
    lines = SOURCE.splitlines()
    refused = [lines[number - 1].strip() for number in sorted(refusals(SOURCE))]
    assert refused == [
        *("y = 2", "raise ValueError(", "y", ")"),
        *("except ZeroDivisionError as error:", "raise ValueError from error"),
        "raise ValueError(x)",
    ]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("y = 2", "y = 2  # two", True),
        ("def f(x):", 'def f(x):\n    """Says so."""', True),
        ("y = 2", "y = 3", False),
    ],
)
def test_a_fingerprint_is_of_the_code_alone(tmp_path: Any, old: str, new: str, same: bool) -> None:
    files = (tmp_path / "a.py", tmp_path / "b.py")
    files[0].write_text(SOURCE)
    files[1].write_text(SOURCE.replace(old, new))
    first, second = map(fingerprint, files)
    assert (first == second) is same


@pytest.mark.parametrize(("held", "same"), [([], True), ([ast.Name("T")], False)])
def test_a_fingerprint_is_without_empty_fields_of_later_pythons(
    held: list[ast.AST], same: bool
) -> None:
    """As the type parameters of functions, which Python 3.12 added."""
    before, later = ast.parse(SOURCE), ast.parse(SOURCE)
    for node in ast.walk(later):
        if isinstance(node, ast.FunctionDef):
            node._fields, node.of_later = (*node._fields, "of_later"), held  # type: ignore[misc, attr-defined]
    assert (outline(before) == outline(later)) is same
