"""Skips a test on an accelerator that failed only for what this machine or platform lacks.

Without it, every test would have to know how many ranks its trials start, and on which platforms
each of its plugins runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Final

import pytest

from ascend_run.testing.runtime import PLATFORM_VARIABLE

LACKING: Final = (
    re.compile(r"platform \w+: rank \d+ of this machine has no GPU; torch sees [1-9]\d*"),
    re.compile(r"'npu-\w+' does not run on platform '(?!npu)\w+'"),
)


def lacking(message: str, platform: str) -> str | None:
    """Return what a failure says is lacking; None if it is about anything else, or on a CPU."""
    if platform == "cpu":
        return None
    found = (pattern.search(message) for pattern in LACKING)
    return next((match.group() for match in found if match), None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Turn such a failure into a skip with its reason."""
    try:
        return (yield)
    except Exception as error:
        reason = lacking(str(error), os.environ.get(PLATFORM_VARIABLE, "cpu"))
        if reason is None:
            raise
        pytest.skip(reason)
