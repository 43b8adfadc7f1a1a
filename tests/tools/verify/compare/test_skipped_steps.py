"""A step that overflows is said to have changed nothing, or what it changed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ascend_run.tools.verify.compare.skipped_steps import skipped
from ascend_run.tools.verify.compare.verdict import Phase

from .made_up import records

MOMENT = "the optimizer's exp_avg of a.b.weight"


@pytest.mark.parametrize(("changed", "state"), [(None, "-"), ([], "ok")])
def test_a_step_that_changes_nothing_is_right(changed: Sequence[str] | None, state: str) -> None:
    check, fault = skipped(records(changed_by_overflow=changed))
    assert (check.state, fault) == (state, None)


@pytest.mark.parametrize(
    ("changed", "module", "suspects"),
    [
        (["the schedule"], "schedule", ()),
        (["a.b.weight (0, 0)", MOMENT, "the schedule"], "optimizer", ("a.b",)),
        ([MOMENT], "optimizer", ()),
    ],
)
def test_what_changes_all_the_same_is_named(
    changed: Sequence[str], module: str, suspects: tuple[str, ...]
) -> None:
    made = records(2)
    made[1].changed_by_overflow = changed
    check, fault = skipped(made)
    assert check.state == "WRONG"
    assert fault is not None
    assert (fault.phase, fault.module, fault.suspects) == (Phase.OPTIMIZER, module, suspects)
    assert fault.why == f"a step whose gradients are infinite changes {changed[0]} on rank 1"
