"""The table of features beside tasks: each acts somewhere, and what is refused has its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.registry.discovery import discover
from tests.support.feature_cases import CHANGING, COMPARED, COVERING, REFUSED, acts

TESTS = Path(__file__).parents[2]
NAMES = (*COMPARED, *CHANGING)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "eod-reset"])
def test_a_feature_acts_in_a_layout_in_which_every_task_runs_it(name: str) -> None:
    """But for what splits documents itself, as the tasks do."""
    refused, _ = REFUSED.get(name, ((), ""))
    assert [where for where in COVERING if acts(name, where) and where not in refused]


@pytest.mark.parametrize("name", [name for name in NAMES if name in REFUSED])
def test_a_feature_is_refused_for_a_reason_that_its_suite_tests(name: str) -> None:
    module = discover()[name].value.partition(":")[0].removeprefix("ascend_run.")
    suite = TESTS.joinpath(*module.split("."))
    _, reason = REFUSED[name]
    assert [path for path in suite.glob("test_*.py") if reason in path.read_text(encoding="utf-8")]
