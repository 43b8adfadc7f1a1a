"""A plugin of pytest: writes which cases are collected, and the outcome of each once it is known,
as lines of JSON to the file that ``VARIABLE`` names."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any, Final

import pytest

from tests.support.exhaustive import LEFT_OUT

VARIABLE: Final = "ASCEND_RUN_SUITE_REPORTS"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the ids of the cases that are to run, and of those left to the campaign."""
    kept = [item.nodeid for item in session.items]
    _write(kept=kept, left=session.config.stash.get(LEFT_OUT, []))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write which case begins: should the process end, it was this one."""
    _write(begins=nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write the verdict when a case and its fixtures have ended."""
    item.stash[_REPORTS] = []
    result = yield
    failed = [report for report in item.stash[_REPORTS] if report.outcome != "passed"]
    verdict = failed[0].outcome if failed else "passed"
    why = {"why": str(failed[0].longrepr)[-WHY:]} if failed else {}
    _write(case=item.nodeid, outcome={"verdict": verdict, **why})
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the reports of set-up, call and teardown."""
    report = yield
    item.stash[_REPORTS].append(report)
    return report


_REPORTS: Final = pytest.StashKey[list[pytest.TestReport]]()
WHY: Final = 2000
"""Characters of the end of a failure's text."""


def _write(**values: Any) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(values) + "\n")
