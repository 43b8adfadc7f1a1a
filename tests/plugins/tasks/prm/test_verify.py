"""``verify`` of rated steps: each layout is that of one rank, in float64 for each
parameter, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_run.tools.verify.compare.verdict import Phase
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.verifier import Verifier
from tests.support import verified_tasks
from tests.support.needed_plugins import names_of
from tests.support.rated_solutions import OPTIONS, write_solutions
from tests.support.verified_tasks import (
    TIED,
    assert_diverges_in,
    assert_is_one_rank,
    question,
)
from tests.tools.verify.faults import Undo

from . import faults


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_solutions(tmp_path_factory.mktemp("rated"), 24)


LAYOUTS = {**verified_tasks.LAYOUTS, "pp=2, tied": TIED}


def question_of(rated: Path, layout: str) -> Question:
    return question("prm", rated, LAYOUTS[layout], OPTIONS)


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, rated: Path, layout: str) -> None:
    assert_is_one_rank(verify(question_of(rated, layout)), "it has no formula for task=prm")


@pytest.mark.exhaustive(by=lambda fault: [])
@pytest.mark.parametrize(
    ("fault", "layout", "phase"),
    [
        (faults.count_every_position, "tp=2", Phase.BACKWARD),
        (
            faults.take_the_next_rating_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.FORWARD,
        ),
    ],
)
def test_each_fault_is_found(
    verify: Verifier, rated: Path, fault: Callable[[], Undo], layout: str, phase: Phase
) -> None:
    assert_diverges_in(phase, verify(question_of(rated, layout), fault))
