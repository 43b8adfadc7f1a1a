"""What is expected of memory, against runs: the committed result, and a sample of it again."""

from __future__ import annotations

import json
import random

import pytest

from ascend_run.plugin_api.testing.pool import GlooPool
from benchmarks.memory_layouts import CASES
from benchmarks.memory_prediction import RESULT, TOLERANCE, compare

SAMPLE = random.Random(4).sample([case for case in CASES if case.ranks <= 2], 3)


def test_the_committed_result_is_of_every_layout_and_within_five_percent() -> None:
    result = json.loads(RESULT.read_text())
    assert result["layouts"] == len(CASES) >= 20
    assert {row["layout"] for row in result["rows"]} == {case.name for case in CASES}
    assert result["ranks"] == len(result["rows"]) == sum(case.ranks for case in CASES)
    assert result["passes"]
    assert result["worst"] <= TOLERANCE == 0.05
    for row in result["rows"]:
        expected, measured = row["peak"]
        assert abs(expected / measured - 1) <= TOLERANCE


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_a_run_takes_what_was_expected(gloo_pool: GlooPool, case: object) -> None:
    for row in compare(case, gloo_pool):  # type: ignore[arg-type]
        expected, measured = row["weights"]
        assert expected == measured
        expected, measured = row["optimizer"]
        assert expected == pytest.approx(measured, rel=1e-3)  # shares differ by their padding
        assert abs(row["off"]) <= TOLERANCE, row
