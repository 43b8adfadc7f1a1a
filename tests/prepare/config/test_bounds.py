"""Bounds of numbers that Megatron states in prose, and of counts that are planned one by one."""

from __future__ import annotations

import pytest

from ascend_run.prepare.config.bounds import LARGEST_COUNTS, bound_problem


@pytest.mark.parametrize(("name", "most"), LARGEST_COUNTS.items())
def test_a_count_above_its_largest_is_refused(name: str, most: int) -> None:
    assert bound_problem(name, most) is None
    assert bound_problem(name, most + 1) == f"must be at most {most}"
    assert bound_problem(name, 10**18) == f"must be at most {most}"
